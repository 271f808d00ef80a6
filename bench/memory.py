#!/usr/bin/env python3
"""Resident memory of whole processes against the bytes that the cache declares, near 8K tokens of context.

    bench/memory.py PROGRAM MODEL TEXT SPEC [SPEC ...]      (the first spec is the one to compare with: f16)

Runs the program once per spec over the same text, one token generated, and prints the largest resident set, the cache
as the program declares it, and the share of the declared difference that the process really saved.
"""
import os
import re
import subprocess
import sys


def measure(program, model, text, spec):
    process = subprocess.Popen([program, "run", "-m", model, "-f", text, "--raw", "-n", "1", "--ctx", "8192", "--threads",
                                "1", "--temp", "0", "--cache", spec], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit("%s failed:\n%s" % (spec, output))
    declared = re.search(r"cache ([0-9.]+) MiB", output)
    tokens = re.search(r"of (\d+) tokens packed", output) or re.search(r"prompt (\d+)", output)
    return usage.ru_maxrss / 1024, float(declared.group(1)), tokens.group(1) if tokens else "?"


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    program, model, text, *specs = sys.argv[1:]
    base = measure(program, model, text, specs[0])
    print("| spec | tokens | largest resident set, MiB | cache declared, MiB | saved, measured / declared |")
    print("|---|---|---|---|---|")
    print("| %s | %s | %.1f | %.1f | |" % (specs[0], base[2], base[0], base[1]))
    for spec in specs[1:]:
        rss, declared, tokens = measure(program, model, text, spec)
        share = (base[0] - rss) / (base[1] - declared)
        print("| %s | %s | %.1f | %.1f | %.3f |" % (spec, tokens, rss, declared, share))


if __name__ == "__main__":
    main()
