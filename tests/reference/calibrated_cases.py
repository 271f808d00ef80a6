"""Cases of the methods that read a calibration file. The files are made up: what a method does with them is judged, not
how they are found."""

import numpy as np

from basis import Rope
from calibrated import Calibration
from cases import ADJACENT, HALVES, Case
from narrow import F32


def clusters(random, channels, groups):
    """Order and edges of groups of unequal size."""
    order = np.argsort(random.words(channels), kind="stable")
    cuts = np.sort(np.argsort(random.words(channels - 1), kind="stable")[: groups - 1]) + 1
    return order, np.concatenate([[0], cuts, [channels]])


def calibrate(case, random, keys):
    """Arrays as a calibration pass would write them, made up."""
    method = case.spec.partition(":")[0]
    s, found = case.shape, Calibration(method)
    options = dict(part.split("=") for part in case.spec.partition(":")[2].split(","))
    dim, heads, layers = s.dims["key"], s.kv_heads, range(s.layers)
    if method == "kvtuner":
        found.add("base", -1, -1, "key", [1 if options.get("base") == "token" else 0])
        for layer in layers:
            found.add("bits", layer, -1, "key", [(8, 4, 2)[layer % 3], (4, 2, 8, 3)[layer % 4]])
    elif method == "rotatekv":
        for layer in layers:
            found.add("order", layer, -1, "key", np.argsort(random.words(heads * dim), kind="stable"))
    elif method == "skvq":
        group = options.get("group", "128")
        for layer in layers:
            for side in ("key", "value"):
                d = s.dims[side]
                if options.get("across") == "1":
                    parts = clusters(random, heads * d, max(1, heads * d // int(group)))
                    for name, values in zip((f"order{group}x", f"edges{group}x"), parts):
                        found.add(name, layer, -1, side, values)
                    continue
                for head in range(heads):
                    parts = clusters(random, d, max(1, d // int(group)))
                    for name, values in zip((f"order{group}", f"edges{group}"), parts):
                        found.add(name, layer, head, side, values)
    elif method == "kvquant":
        bits = int(options.get("bits", "3"))
        for layer in layers:
            for head in range(heads):
                low, high = np.sort(keys[:, head], axis=0)[[2, -3]]
                half = F32(0.5) * (high - low)
                found.add("shift", layer, head, "key", F32(0.5) * (high + low))
                found.add("scale", layer, head, "key", np.where(half > 0, half, F32(1)))
            for side in ("key", "value"):
                book = np.linspace(-0.9, 0.9, 1 << bits).astype(F32) + random.normal(1 << bits) * F32(0.2 / (1 << bits))
                found.add(f"book{bits}", layer, -1, side, np.sort(book).astype(F32))
    return found

class FileCase(Case):
    def calibrate(self, random, keys):
        return calibrate(self, random, keys)


def yarn(rotary):
    return Rope(rotary, HALVES, 1e6, 0.25, None, (1.0, 32.0, 1.0, 32768))


def stretched(rotary):
    return Rope(rotary, HALVES, 500000.0, 1.0, np.where(np.arange(rotary // 2) > rotary // 4, 8.0, 1.0))


def calibrated_cases():
    every = (1, 7, 64, 0)
    # kvtuner
    cases = [
        FileCase("kvtuner:calib=FILE", 128, 300, (4, 2), "ob", every),
        FileCase("kvtuner:calib=FILE", 80, 517, (2, 1), "ocz", (64,)),
        FileCase("kvtuner:calib=FILE", 96, 150, (2, 1), "obn", (7,), layers=4, layer=1),
        FileCase("kvtuner:calib=FILE", 64, 300, (2, 1), "cb", (0,), layers=4, layer=3),
        FileCase("kvtuner:calib=FILE,base=token", 128, 150, (4, 2), "ob", every, layers=3, layer=1),
        FileCase("kvtuner:calib=FILE,base=token", 80, 300, (2, 1), "oc", (64,)),
        FileCase("kvtuner:calib=FILE,group=64,residual=128,front=4", 256, 300, (2, 1), "ob", (0,), layers=3, layer=2),
    ]
    # kvquant
    cases += [
        FileCase("kvquant:calib=FILE", 128, 300, (4, 2), "b", every, (128, HALVES)),
        FileCase("kvquant:calib=FILE", 64, 517, (2, 1), "o", (64,), (64, ADJACENT), start=5000, gaps=True),
        FileCase("kvquant:calib=FILE,bits=4,outliers=0.05", 80, 300, (2, 1), "bz", (7, 0), (40, HALVES)),
        FileCase("kvquant:calib=FILE,bits=2,outliers=0", 96, 300, (2, 2), "cn", (0,), (96, ADJACENT)),
        FileCase("kvquant:calib=FILE,outliers=0.03,front=0", 256, 200, (2, 1), "et", (1, 0),
                 (256, HALVES), layers=2, layer=1),
        FileCase("kvquant:calib=FILE", 128, 200, (2, 1), "o", (0,), yarn(128), start=30000, note="yarn"),
        FileCase("kvquant:calib=FILE", 64, 200, (2, 1), "o", (0,), stretched(64), start=9000, note="factors"),
    ]
    # rotatekv
    cases += [
        FileCase("rotatekv:calib=FILE", 128, 300, (4, 2), "ob", every, (128, HALVES)),
        FileCase("rotatekv:calib=FILE", 64, 517, (4, 4), "o", (64,), (64, ADJACENT), start=77, gaps=True),
        FileCase("rotatekv:calib=FILE,bits=3,pins=0", 80, 300, (3, 3), "oz", (7, 0), (80, HALVES)),
        FileCase("rotatekv:calib=FILE,bits=4,pins=5,front=3", 96, 300, (6, 6), "e", (1, 0), (96, HALVES)),
        FileCase("rotatekv:calib=FILE", 256, 200, (4, 2), "b", (0,), (64, ADJACENT), layers=2, layer=1),
        FileCase("rotatekv:calib=FILE", 80, 200, (2, 1), "cn", (0,), (80, HALVES)),
        FileCase("rotatekv:calib=FILE", 64, 127, (2, 1), "o", (1,), (64, HALVES)),
    ]
    # skvq
    cases += [
        FileCase("skvq:calib=FILE,group=32", 128, 300, (4, 2), "ob", every),
        FileCase("skvq:calib=FILE", 256, 300, (2, 1), "oz", (64,)),
        FileCase("skvq:calib=FILE,group=32,v=1.5", 80, 517, (2, 1), "ocz", (7,)),
        FileCase("skvq:calib=FILE,k=1.5,v=1.5,group=64", 128, 300, (2, 1), "obn", (1, 0)),
        FileCase("skvq:calib=FILE,group=64,across=1", 96, 300, (4, 4), "ob", (7, 0)),
        FileCase("skvq:calib=FILE,k=4,v=3,group=32,params=f16,clip=1,front=0", 64, 300, (2, 2), "oce", (0,)),
        FileCase("skvq:calib=FILE,group=32,across=1,v=1.5", 64, 300, (4, 2), "cz", (0,), layers=2, layer=1),
    ]
    return cases
