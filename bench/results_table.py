#!/usr/bin/env python3
"""Prints the rows of `kvmosaic compare --json` files as one Markdown table; a cache that is in several files is shown once.
Usage: results_table.py FILE.json ..."""
import json
import sys


def number(x, form):
    return "" if x is None else form % x


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    seen = set()
    print("| cache | bits at 2K | at 8K | PPL ratio | KL mean | KL p99 | top-1 |")
    print("|---|---|---|---|---|---|---|")
    for name in sys.argv[1:]:
        with open(name, encoding="utf-8") as file:
            result = json.load(file)
        for row in result["rows"]:
            if row["spec"] in seen:
                continue
            seen.add(row["spec"])
            if row["spec"] == "f16":
                print("| `f16` | %.2f | %.2f | 1 | reference | | |" % (row["true_bits_2k"], row["true_bits_8k"]))
                continue
            floor = row["spec"] == "floor"
            print("| %s | %s | %s | %s | %s ± %.2g | %s | %.2f %% |" % (
                "floor: `f16` against `f32`" if floor else "`%s`" % row["spec"],
                "" if floor else number(row["true_bits_2k"], "%.2f"), "" if floor else number(row["true_bits_8k"], "%.2f"),
                number(row["ppl_ratio"], "%.3f"),
                "%.1e" % row["kl_mean"] if row["kl_mean"] < 1e-4 else "%.4f" % row["kl_mean"], row["kl_error"],
                "%.1e" % row["kl_p99"] if row["kl_p99"] < 1e-3 else "%.3f" % row["kl_p99"], 100 * row["top1"]))


if __name__ == "__main__":
    main()
