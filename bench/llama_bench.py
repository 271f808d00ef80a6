#!/usr/bin/env python3
"""Speed of whole models by llama.cpp's own bench tool: its cache (f16, flash attention) against ours, one binary.

    bench/llama_bench.py LLAMA_BENCH MODEL [REPEATS [SPEC ...]]

Prefill of 512 and decoding of 32 tokens at depths 0 and 1024, with 1 and 2 threads. Medians of the repeats, and the
ratio to llama.cpp's cache of the same run. Run it on a quiet machine.
"""
import json
import os
import statistics
import subprocess
import sys


def run(tool, model, repeats, threads, spec):
    env = dict(os.environ, KVMOSAIC_CACHE=spec) if spec else {k: v for k, v in os.environ.items() if k != "KVMOSAIC_CACHE"}
    words = [tool, "-m", model, "-p", "512", "-n", "32", "-d", "0,1024", "-t", str(threads), "-r", str(repeats), "-fa", "1",
             "-o", "json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    rates = {}
    for test in json.loads(done.stdout):
        kind = "prefill" if test["n_prompt"] else "decode"
        rates[kind, test["n_depth"]] = statistics.median(test["samples_ts"])
    return rates


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    tool, model = sys.argv[1:3]
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    specs = sys.argv[4:] or ["f16", "kivi:bits=2", "mixkvq"]
    columns = [("prefill", 0), ("decode", 0), ("prefill", 1024), ("decode", 1024)]
    print("| threads | cache | " + " | ".join("%s at %d" % c for c in columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for threads in (1, 2):
        stock = None
        for spec in [None] + specs:
            rates = run(tool, model, repeats, threads, spec)
            stock = stock or rates
            cells = ["%.1f t/s (%.2f×)" % (rates[c], rates[c] / stock[c]) for c in columns]
            print("| %d | %s | %s |" % (threads, "`%s`" % spec if spec else "llama.cpp f16", " | ".join(cells)), flush=True)


if __name__ == "__main__":
    main()
