#!/usr/bin/env python3
"""Judges the cache by a second implementation of every method, in NumPy, written from the documents alone.

    check.py BUILD_DIR [PATTERN ...]   compare golden.json, the reference and the library (method_dump); PATTERN: only
                                       cases whose name contains it
    check.py --write                   let the reference write golden.json anew

Codes, scales, offsets, outliers, maps and frozen plans must be equal bit for bit, decoded values too; where keys are
turned, decoded values may differ in the last bits. Exit status 77: NumPy is missing (not with KVMOSAIC_REFERENCE=need).
"""

import argparse
import concurrent.futures
import json
import math
import os
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "golden.json")
SYSTEM_PYTHON = "/usr/bin/python3"  # the one that Debian's python3-numpy is for

try:
    import numpy as np
except ImportError:
    if os.path.exists(SYSTEM_PYTHON) and os.path.realpath(sys.executable) != os.path.realpath(SYSTEM_PYTHON):
        if subprocess.run([SYSTEM_PYTHON, "-c", "import numpy"], capture_output=True, check=False).returncode == 0:
            os.execv(SYSTEM_PYTHON, [SYSTEM_PYTHON] + sys.argv)
    print("check.py: skipped, NumPy is not installed (Debian: python3-numpy)", file=sys.stderr)
    sys.exit(1 if os.environ.get("KVMOSAIC_REFERENCE") == "need" else 77)

import cases  # noqa: E402
from calibrated_cases import calibrated_cases  # noqa: E402
import dump  # noqa: E402
import stream  # noqa: E402
import traps  # noqa: E402

# Attention over restored rows: its bound here is that of fp32 sums (attention from codes has tests of its own).
os.environ["KVMOSAIC_RESTORE"] = "1"


def all_cases():
    return cases.plain_cases() + calibrated_cases()


def reference(case, made):
    q, k, v, positions, calibration = made
    method = stream.open_method(case.spec, case.shape, calibration)
    return stream.Stream(method, q, k, v, positions, case.steps[0] or case.total)


def first_difference(a, b):
    """Where two arrays of one shape differ first, and how often."""
    at = np.argwhere(a != b)
    index = tuple(int(i) for i in at[0])
    return f"at {list(index)}: reference {a[index]}, library {b[index]} ({len(at)} of {a.size} differ)"


def compare(ours, found):
    """Sentences about what differs; at most a few."""
    faults = []
    expected = dict(ours.sections())
    names = [name for name in found if not name.endswith("decoded") and name not in ("attention", "footprint")]
    for name in [n for n in expected if n not in found] + [n for n in names if n not in expected]:
        faults.append(f"{name}: only in the {'reference' if name in expected else 'library'}")
    for name, want in expected.items():
        if name not in found:
            continue
        have = found[name].reshape(-1) if want.ndim == 1 else found[name]
        if want.shape != have.shape:
            faults.append(f"{name}: reference {want.shape}, library {have.shape}")
        elif not np.array_equal(want, have):
            faults.append(f"{name} {first_difference(want, have)}")
    for (side, head), want in ours.decoded.items():
        have = found[f"{side} {head} decoded"]
        close = want == have
        if ours.plans[side, head].pre_rope:
            close |= np.abs(want - have) <= 4e-7 * np.maximum(np.abs(want), np.abs(want).max(axis=1, keepdims=True))
        if not close.all():
            faults.append(f"{side} {head} decoded " + first_difference(np.where(close, have, want), have))
    return faults


def attention(case, made, found):
    """The last row's attention is one softmax over all rows that the cache holds, raw and packed."""
    if not found["attention"].size:
        return []
    shape, q = case.shape, made[0][-1].astype(np.float64)
    if not np.isfinite(q).all():
        return []
    worst = 0.0
    for h in range(shape.heads):
        head = h // (shape.heads // shape.kv_heads)
        keys = found[f"key {head} decoded"].astype(np.float64)
        values = found[f"value {head} decoded"].astype(np.float64)
        scores = keys @ q[h] / math.sqrt(shape.dims["key"])
        weights = np.exp(scores - scores.max())
        want = weights @ values / weights.sum()
        reach = np.abs(values).max()
        # fp32 scores carry an error of their size, which the softmax passes on
        bound = 2e-6 * reach * (4 + np.abs(keys * q[h]).sum(axis=1).max() / math.sqrt(shape.dims["key"]))
        worst = max(worst, float(np.abs(want - found["attention"][h]).max() / max(bound, 1e-30)))
    return [] if worst <= 1 else [f"attention of the last row: {worst:.3g} times its bound"]


def judge(case, program):
    """(name, digest, sum, faults) of one case."""
    with np.errstate(all="ignore"):
        made = case.make()
        ours = reference(case, made)
        faults = []
        if program:
            try:
                steps = dump.run(program, case, made)
            except dump.DumpError as error:
                return case.name, ours.digest(), ours.sum(), [str(error)]
            faults = compare(ours, steps[0][1])
            faults += attention(case, made, steps[0][1])
            for step, found in steps[1:]:
                for name, have in found.items():
                    if name == "footprint":
                        continue  # how much slack is held depends on the steps
                    if not np.array_equal(have, steps[0][1][name]) and name != "attention":
                        faults.append(f"{name}: steps of {step} and of {steps[0][0]} differ")
                        break
        return case.name, ours.digest(), ours.sum(), faults


def check_golden(golden, name, digest, total):
    if name not in golden:
        return ["not in golden.json: write it with check.py --write"]
    faults = []
    if golden[name]["sha256"] != digest:
        faults.append("the reference's own result is not the one of golden.json")
    if not math.isclose(golden[name]["sum"], total, rel_tol=1e-6, abs_tol=1e-3):
        faults.append(f"sum of decoded values: golden {golden[name]['sum']}, now {total}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", help="build folder, or the method_dump program itself")
    parser.add_argument("pattern", nargs="*")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if not args.build and not args.write:
        parser.error("BUILD_DIR or --write is needed")
    program = None
    if args.build:
        inside = os.path.join(args.build, "bin", "method_dump")
        program = inside if os.path.exists(inside) else shutil.which(args.build)
        if not program:
            parser.error(f"no method_dump in {args.build}/bin: build the target method_dump")
    started, failed = time.time(), 0
    chosen = [c for c in all_cases() if not args.pattern or any(p in c.name for p in args.pattern)]
    names = [c.name for c in chosen]
    assert len(set(names)) == len(names), "two cases have one name"
    golden = {} if args.write or not os.path.exists(GOLDEN) else json.load(open(GOLDEN, encoding="utf-8"))
    results = []
    with concurrent.futures.ProcessPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        for result in pool.map(judge, chosen, [program] * len(chosen)):
            name, digest, total, faults = result
            if not args.write:
                faults = faults + check_golden(golden, name, digest, total)
            results.append(result)
            if faults:
                failed += 1
                print(f"FAIL {name}", *(f"    {fault}" for fault in faults[:6]), sep="\n", flush=True)
    count = len(results)
    if not args.pattern:
        if not args.write:
            for name in sorted(set(golden) - set(names)):
                failed += 1
                print(f"FAIL {name}: in golden.json, but no case")
        trapped, ran = traps.run(program)
        count, failed = count + ran, failed + trapped
    if args.write and not failed:
        content = {name: {"sha256": digest, "sum": total} for name, digest, total, _ in results}
        with open(GOLDEN, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.write("\n")
    print(f"{count - failed} of {count} passed in {time.time() - started:.1f} s")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
