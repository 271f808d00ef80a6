#!/usr/bin/env python3
"""Resident memory of whole processes against the bytes that the cache declares, near 8K tokens of context.

    bench/memory.py PROGRAM MODEL TEXT SPEC [SPEC ...]      (the first spec is the one to compare with: f16)

Runs the program once per spec over the same text and a few generated tokens. Prints the resident set while it generates
(its last second), the cache as the program declares it, and the share of the declared difference that the process
really saves.
"""
import re
import subprocess
import sys
import tempfile
import time


def resident(pid):
    try:
        with open("/proc/%d/status" % pid) as status:
            found = re.search(r"VmRSS:\s+(\d+) kB", status.read())
        return int(found.group(1)) / 1024 if found else None
    except OSError:
        return None


def measure(program, model, text, spec):
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([program, "run", "-m", model, "-f", text, "--raw", "-n", "60", "--ctx", "8192",
                                    "--threads", "1", "--temp", "0", "--cache", spec], stdout=log, stderr=log)
        samples = []
        while process.poll() is None:
            samples.append((time.monotonic(), resident(process.pid) or 0.0))
            time.sleep(0.02)
        end = samples[-1][0]  # generation takes longer than the last second, tearing down far less
        last = max(size for at, size in samples if at > end - 1.0)
        log.seek(0)
        output = log.read()
    if process.returncode:
        sys.exit("%s failed:\n%s" % (spec, output))
    declared = re.search(r"cache ([0-9.]+) MiB", output)
    tokens = re.search(r"of (\d+) tokens packed", output) or re.search(r"prompt (\d+)", output)
    return last, float(declared.group(1)), tokens.group(1) if tokens else "?"


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    program, model, text, *specs = sys.argv[1:]
    base = measure(program, model, text, specs[0])
    print("| spec | tokens | resident, MiB | cache declared, MiB | saved, measured / declared |")
    print("|---|---|---|---|---|")
    print("| `%s` | %s | %.1f | %.1f | |" % (specs[0], base[2], base[0], base[1]), flush=True)
    for spec in specs[1:]:
        rss, declared, tokens = measure(program, model, text, spec)
        share = (base[0] - rss) / (base[1] - declared)
        print("| `%s` | %s | %.1f | %.1f | %.3f |" % (spec, tokens, rss, declared, share), flush=True)


if __name__ == "__main__":
    main()
