"""Runs the dump program over a case and reads what it wrote."""

import os
import subprocess
import tempfile

import numpy as np


class DumpError(Exception):
    pass


def read_sections(path):
    """[(step, {name: array})] in the order of the steps."""
    steps = []
    with open(path, "rb") as file:
        while line := file.readline():
            name, kind, rows, columns = line.decode().rstrip("\n").split("|")
            kind, rows, columns = np.dtype("<" + kind), int(rows), int(columns)
            array = np.frombuffer(file.read(rows * columns * kind.itemsize), kind).reshape(rows, columns)
            if name == "step":
                steps.append((int(array[0, 0]), {}))
            else:
                steps[-1][1][name] = array
    return steps


def run(program, case, made):
    """Sections of each step size of a case; `made` is what Case.make gave."""
    q, k, v, positions, calibration = made
    with tempfile.TemporaryDirectory(prefix="kvmosaic-reference-") as folder:
        paths = {name: os.path.join(folder, name) for name in ("case", "out", "calibration")}
        if calibration is not None:
            with open(paths["calibration"], "wb") as file:
                file.write(calibration.text(case.shape))
        case.write(paths["case"], q, k, v, positions, paths["calibration"])
        result = subprocess.run([program, paths["case"], paths["out"]], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise DumpError(result.stderr.strip() or f"method_dump ended with {result.returncode}")
        return read_sections(paths["out"])
