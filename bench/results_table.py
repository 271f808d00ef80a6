#!/usr/bin/env python3
"""Prints results of `kvmosaic --json` files as Markdown tables.

  results_table.py [--at 2k,32k] COMPARE.json ...   rows of compare; a cache that is in several files is shown once
  results_table.py TUNE.json ...                    front and defaults of each search, beside the text it did not see
"""
import argparse
import json
import sys


def number(x, form):
    return "" if x is None else form % x


def small(x):
    return "%.1e" % x if x < 1e-4 else "%.4f" % x


def compare_table(results, lengths):
    seen = set()
    print("| cache | bits at %s | PPL ratio | KL mean | KL p99 | top-1 |" % " | at ".join(n.upper() for n in lengths))
    print("|---" * (5 + len(lengths)) + "|")
    for row in (row for result in results for row in result["rows"]):
        if row["spec"] in seen:
            continue
        seen.add(row["spec"])
        bits = [number(row["true_bits_" + n], "%.2f") for n in lengths]
        if row["spec"] == "f16":
            print("| `f16` | %s | 1 | reference | | |" % " | ".join(bits))
            continue
        floor = row["spec"] == "floor"
        print("| %s | %s | %s | %s ± %.2g | %s | %.2f %% |" % (
            "floor: `f16` against `f32`" if floor else "`%s`" % row["spec"], " | ".join("" if floor else b for b in bits),
            number(row["ppl_ratio"], "%.3f"), small(row["kl_mean"]), row["kl_error"],
            "%.1e" % row["kl_p99"] if row["kl_p99"] < 1e-3 else "%.3f" % row["kl_p99"], 100 * row["top1"]))


def tune_table(result):
    defaults = [r for r in result["rows"] if r["label"] and r["label"] != "floor"]
    verdicts = lambda row: {a["default"]: a["verdict"] for a in row.get("against", [])}
    print("| trial | setting | bits | KL | on the other text | %s |" % " | ".join(
        "against `%s`: here, there" % d["setting"] for d in defaults))
    print("|---" * (5 + len(defaults)) + "|")
    for row in sorted((r for r in result["rows"] if r["front"] or r in defaults), key=lambda r: r["true_bits"]):
        there = row.get("holdout", {})
        cells = ["%s, %s" % (verdicts(row)[d["setting"]], verdicts(there).get(d["setting"], "?"))
                 if d["setting"] in verdicts(row) else "" for d in defaults]
        marks = ", default" * (row in defaults) + ", knee" * row["knee"]
        print("| %d%s | `%s` | %.2f | %s ± %.2g | %s | %s |" % (
            row["trial"], marks, row["setting"], row["true_bits"], small(row["kl_mean"]), row["kl_error"],
            "%s ± %.2g" % (small(there["kl_mean"]), there["kl_error"]) if there else "", " | ".join(cells)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", default="2k,8k", help="tokens at which true bits are shown: 2k, 8k, 32k")
    parser.add_argument("files", nargs="+")
    o = parser.parse_args()
    results = []
    for name in o.files:
        with open(name, encoding="utf-8") as file:
            results.append(json.load(file))
    for result in (r for r in results if r.get("kind", "").startswith("kvmosaic study")):
        tune_table(result)
    compared = [r for r in results if "score_from" in r and "kind" not in r]
    if compared:
        compare_table(compared, o.at.split(","))


if __name__ == "__main__":
    sys.exit(main())
