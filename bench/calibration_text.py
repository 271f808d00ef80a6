#!/usr/bin/env python3
"""Prints prose for calibration that no results table is measured on: the passages of LongBench's 2wikimqa and
gov_report prompts. Usage: calibration_text.py DATA_FOLDER > calibration.txt"""
import gzip
import json
import pathlib
import sys

if len(sys.argv) != 2:
    sys.exit(__doc__)
with gzip.open(pathlib.Path(sys.argv[1]) / "longbench_mini.jsonl.gz", "rt", encoding="utf-8") as rows:
    for row in map(json.loads, rows):
        if row["task"] in ("2wikimqa", "gov_report"):
            print(row["prompt"])
