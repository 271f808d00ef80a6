#!/usr/bin/env bash
# The demo: a small real model speaks through a MixKVQ cache, then four caches are compared on a bundled text.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=build/release/bin/kvmosaic
# Threads that wait for each other sleep instead of spinning: on a machine that does other things too, spinning has been
# seen to make this 30 times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

run=(run -m tiny --cache mixkvq -n 300 --seed 2 -p "Describe a day in the life of a honey bee, from morning to evening.")
compare=(compare -m tiny -f data/sample.txt --window 1024 --windows 1 --score-from 256
         --cache f16 --cache kivi:bits=4 --cache kivi:bits=2 --cache mixkvq)

say() { # the command as one would type it
    local line='$ kvmosaic' word
    for word in "$@"; do
        [[ $word == *' '* ]] && word="\"$word\""
        line+=" $word"
    done
    printf '\n%s\n' "$line"
}

say "${run[@]}"
"$program" "${run[@]}" < /dev/null
say "${compare[@]}"
"$program" "${compare[@]}" < /dev/null

cat <<'EOF'

bits    what a value really costs, all counted: codes, scales, offsets, channel maps, tokens kept raw, tables, slack
KL      how far the predictions move from those of the 16-bit cache (0: not at all); floor: what rounding alone does
top-1   how often the most likely next token stays the same

Talk to it yourself:  build/release/bin/kvmosaic run -m tiny --chat --cache mixkvq
EOF
