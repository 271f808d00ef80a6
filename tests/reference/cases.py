"""Rows for every method, made from seeds with integer arithmetic, so that they are the same on every machine."""

import numpy as np

from basis import Rope
from methods import Shape
from narrow import F32


class Random:
    """SplitMix64 by counter; numbers are sums of four 16-bit uniforms, close enough to a normal distribution."""

    def __init__(self, seed):
        self.next = np.uint64(seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)

    def words(self, n):
        with np.errstate(over="ignore"):
            z = self.next + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            self.next = z[-1]
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def normal(self, *shape):
        w = self.words(int(np.prod(shape)))
        parts = sum(((w >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
        return ((parts - 131070).astype(F32) * F32(1 / 37837.0)).reshape(shape)

    def below(self, limit, n):
        return (self.words(n) % np.uint64(limit)).astype(np.int64)


# Kinds of rows, by a letter each: o planted outlier channels (x100), c constant groups, b key bias, z rows of zeros,
# n NaN and infinities, l values beyond f16, t tiny values, e equal channels and rows (ties).
def plant(case, random, rows, key):
    t, heads, dim = rows.shape
    kinds = case.kinds
    if "b" in kinds and key:
        rows[:, :, dim // 5] += F32(60)
        rows[:, :, dim // 2 + 3] -= F32(21.5)
    if "o" in kinds:
        for head in range(heads):
            rows[:, head, random.below(dim, max(1, dim // 40))] *= F32(100)
        rows[:, :, random.below(dim, 3)] *= F32(0.03125)
    if "e" in kinds:
        rows[:, :, 1::7] = rows[:, :, :1]
        rows[5::9] = rows[4:5]
    if "c" in kinds:
        rows[:, :, 2] = F32(1.5)
        rows[:, :, 8:16] = F32(-0.0999)
        rows[40 : t // 2, :, 5] = F32(0.3333)
        rows[t // 3, :, :] = F32(7.25)
        rows[t // 3 + 1, :, :] = F32(-0.001)
    if "z" in kinds:
        rows[random.below(t, max(2, t // 30))] = F32(0)
        rows[:, 0, dim - 1] = F32(0)
        rows[:, -1, 0] = F32(-0.0)
    if "t" in kinds:
        rows[:, :, ::3] *= F32(2.0**-23)
        rows[t // 4 : t // 4 + 3] *= F32(2.0**-20)
    if "l" in kinds:
        rows[t // 2, 0, 3], rows[t // 2 + 40, -1, 1] = F32(70000), F32(-65519.99)
    if "n" in kinds:
        rows[t // 2, :, 7], rows[t // 2 + 1, :, 9] = F32(np.nan), F32(np.inf)
        rows[t // 2 + 2, 0, 3] = F32(-np.inf)


class Case:
    """Spec, shape and rows. `steps`: how many rows a step brings, each tried in turn; 0 is all at once."""

    def __init__(self, spec, dim=64, rows=300, heads=(2, 1), kinds="", steps=(0,), rope=None, value_dim=None, layers=1,
                 layer=0, start=0, gaps=False, note=""):
        self.spec, self.total, self.kinds, self.steps = spec, rows, kinds, tuple(steps)
        self.rope = rope if rope is None or isinstance(rope, Rope) else Rope(*rope)
        self.shape = Shape(heads[0], heads[1], dim, value_dim, self.rope, layer, layers)
        self.start, self.gaps, self.note = start, gaps, note
        sizes = f"d{dim}" + (f"v{value_dim}" if value_dim else "") + f"-h{heads[0]}g{heads[1]}-t{rows}"
        rotation = "" if self.rope is None else f"-{'halves' if self.rope.halves else 'adjacent'}{self.rope.rotary}"
        where = "" if layers == 1 else f"-layer{layer}of{layers}"
        self.name = "/".join(filter(None, (spec, sizes + rotation + where, kinds, note)))

    def make(self):
        """(q, k, v, positions, calibration or None)"""
        seed = 0x811C9DC5
        for byte in self.name.encode():
            seed = (seed ^ byte) * 0x100000001B3 & 0xFFFFFFFF
        random, s, t = Random(seed), self.shape, self.total
        q, k = random.normal(t, s.heads, s.dims["key"]), random.normal(t, s.kv_heads, s.dims["key"])
        v = random.normal(t, s.kv_heads, s.dims["value"])
        q[:, :, ::5] *= F32(2.5)
        k[:, :, 3::17] *= F32(4)
        plant(self, random, k, True)
        plant(self, random, v, False)
        if "n" in self.kinds:
            q[t // 2, 0, 0], q[t // 3, 0, 1] = F32(np.nan), F32(np.inf)
        steps = random.below(3, t) if self.gaps else np.ones(t, np.int64)
        positions = (self.start + np.cumsum(steps) - steps[0]).astype(np.int32)
        calibration = self.calibrate(random, k)
        if self.rope is not None and not set(self.kinds) & set("cen"):  # else planted rows stay as they are
            for head in range(s.kv_heads):
                for at in (slice(i, i + 128) for i in range(0, t, 128)):
                    k[at, head] = self.rope.turn(k[at, head], positions[at], back=False)
        return q, k, v, positions, calibration

    def calibrate(self, random, keys):
        """Calibration, for methods that need one; where the spec says FILE, the path of its file is put."""
        return None

    def write(self, path, q, k, v, positions, calibration_path):
        """The case as the dump program reads it."""
        s = self.shape
        spec = self.spec.replace("FILE", str(calibration_path))
        lines = [f"spec {spec}", f"layers {s.layers} {s.layer}", f"rows {self.total}",
                 f"shape {s.heads} {s.kv_heads} {s.dims['key']} {s.dims['value']}",
                 "steps " + " ".join(map(str, self.steps))]
        if self.rope is not None:
            r = self.rope
            ext, fast, slow, context = r.yarn or (0, 32, 1, 0)
            factors = [] if r.factors is None else ["%.9g" % f for f in r.factors]
            numbers = [r.rotary, int(r.halves), "%.9g" % r.base, "%.9g" % r.freq_scale, ext, 1, fast, slow, context]
            lines.append(" ".join(map(str, ["rope"] + numbers + [len(factors)] + factors)))
        with open(path, "wb") as file:
            file.write(("\n".join(lines) + "\nend\n").encode())
            file.write(np.asarray(positions, "<i4").tobytes())
            for rows in (q, k, v):
                file.write(np.asarray(rows, "<f4").tobytes())


HALVES, ADJACENT = True, False


def plain_cases():
    every = (1, 7, 64, 0)
    cases = [Case(raw, 80, 150, (4, 2), "nl", (1, 0)) for raw in ("f16", "bf16", "f32")]
    # kivi
    cases += [
        Case("kivi", 128, 300, (4, 2), "ob", every),
        Case("kivi", 64, 517, (2, 1), "ocz", (64,)),
        Case("kivi", 80, 300, (4, 1), "cbz", (7,)),
        Case("kivi", 96, 129, (2, 2), "nl", every),
        Case("kivi", 256, 300, (4, 1), "ob", (0,)),
        Case("kivi:bits=4,front=3,keep=5", 96, 301, (4, 4), "oe", every),
        Case("kivi:bits=1,group=128", 80, 300, (2, 1), "cz", (64,)),
        Case("kivi:bits=3,residual=32", 64, 300, (2, 1), "o", every),
        Case("kivi:bits=8,group=64,residual=64,params=bf16", 128, 300, (2, 1), "obl", (7,)),
        Case("kivi:bits=6,group=8,params=f8e4m3", 96, 300, (2, 1), "oct", (64,)),
        Case("kivi:bits=2,params=f8e4m3", 128, 300, (2, 1), "oblz", (0,)),
        Case("kivi:bits=4,params=bf16", 64, 300, (2, 1), "tc", (0,), value_dim=96),
    ]
    # mixkvq
    cases += [
        Case("mixkvq", 128, 300, (4, 2), "ob", every),
        Case("mixkvq", 64, 517, (8, 2), "oczn", (64, 0)),
        Case("mixkvq:hi=2,mid=0.3,front=0", 80, 300, (6, 2), "oez", every),
        Case("mixkvq:hi=1,mid=3", 96, 300, (2, 1), "ob", (0,)),
        Case("mixkvq:query=window,v=4,keep=32,group=128", 256, 420, (4, 1), "ob", (7, 0)),
        Case("mixkvq:raw_share=0.05,mid_share=0.33", 80, 300, (4, 1), "ce", (1, 0)),
        Case("mixkvq:score=scale,raw_share=0.1,mid_share=0.1,params=bf16", 96, 300, (2, 1), "obe", (0,)),
        Case("mixkvq:score=query,raw_share=0.1,mid_share=0.5", 64, 300, (2, 1), "ob", (0,)),
        Case("mixkvq:map=prompt", 64, 420, (2, 1), "ob", (0,)),
        Case("mixkvq:map=prompt,hi=3,mid=0.7", 64, 420, (2, 1), "ob", (300,)),
    ]
    # kitty
    cases += [
        Case("kitty", 128, 333, (4, 2), "ob", every),
        Case("kitty", 80, 517, (2, 1), "oecz", (64,)),
        Case("kitty:variant=pro", 96, 417, (4, 4), "obn", (7, 0)),
        Case("kitty:ratio=0.2,v=4", 64, 333, (2, 1), "ez", (0,)),
        Case("kitty:ratio=0", 64, 300, (2, 1), "o", (0,)),
        Case("kitty:ratio=1,front=0,group=32", 256, 300, (2, 1), "o", (0,)),
        Case("kitty:params=bf16,front=5,keep=7", 128, 417, (2, 1), "oc", (0,)),
    ]
    # pnmix
    cases += [
        Case("pnmix", 128, 333, (4, 2), "ob", every, (128, HALVES)),
        Case("pnmix", 64, 517, (8, 2), "obz", (64,), (64, ADJACENT), start=1000),
        Case("pnmix", 80, 300, (4, 1), "oe", (7, 0), (40, HALVES)),
        Case("pnmix", 96, 300, (2, 2), "ocn", (1, 0)),
        Case("pnmix:keep=33,front=40", 80, 390, (8, 4), "", (1, 7, 0), (80, HALVES)),
        Case("pnmix:b_hi=4,b_lo=2,r=0.3", 256, 300, (2, 1), "o", (0,), (64, ADJACENT)),
        Case("pnmix:r=0.25,v=4,front=0,group=32", 80, 300, (4, 2), "o", (0,), (30, HALVES)),
        Case("pnmix:b_hi=2,r=0.7,params=bf16", 64, 300, (2, 1), "cz", (0,), (64, HALVES)),
        Case("pnmix", 64, 150, (2, 1), "o", (7,), (64, HALVES)),
    ]
    # innerq
    for variant in ("base", "small", "hybrid"):
        cases += [
            Case(f"innerq:variant={variant}", 128, 333, (4, 2), "ob", every if variant == "hybrid" else (0,)),
            Case(f"innerq:variant={variant}", 80, 300, (2, 1), "oczn", (64,)),
        ]
    cases += [
        Case("innerq:variant=hybrid,asym=4level", 64, 517, (2, 1), "oez", (7, 0)),
        Case("innerq:variant=hybrid,asym=4level,params=bf16", 96, 300, (2, 2), "oct", (0,)),
        Case("innerq:variant=small,norm=off,params=f8e4m3", 96, 300, (2, 1), "ob", (0,)),
        Case("innerq:variant=hybrid,front=3,keep=10,group=8", 256, 300, (2, 1), "oz", (1, 0)),
        Case("innerq", 64, 129, (2, 1), "o", (7,)),
        Case("innerq", 64, 160, (2, 1), "o", (1, 0)),
    ]
    # mosaic
    cases += [
        Case("mosaic", 128, 300, (4, 2), "ob", every, (128, HALVES)),
        Case("mosaic", 64, 517, (8, 2), "oczn", (64, 0), (64, ADJACENT), start=1000),
        Case("mosaic:k=2,v=2", 128, 300, (2, 1), "b", (7,), (128, ADJACENT)),
        Case("mosaic:k=2,v=2.5", 80, 300, (4, 2), "ob", every, (80, HALVES), start=8100),
        Case("mosaic:k=3,v=3.5", 256, 300, (4, 1), "ob", (0,), (64, HALVES), start=20000),
        Case("mosaic:k=1.25,v=1.5,front=0", 64, 300, (4, 2), "oez", (1, 0), (64, HALVES)),
        Case("mosaic:keep=64", 128, 333, (4, 1), "o", every, (96, ADJACENT)),
        Case("mosaic", 80, 420, (4, 2), "b", (7, 0), (40, HALVES), start=8000, gaps=True, note="gaps"),
        Case("mosaic", 64, 300, (2, 1), "tl", (64,), (64, HALVES)),
        Case("mosaic:k=4.5,v=5", 96, 300, (2, 2), "obt", (0,), (96, HALVES)),
        Case("mosaic:k=0.5,v=5.5", 64, 300, (2, 1), "cz", (0,), (64, HALVES)),
        Case("mosaic", 128, 300, (4, 2), "ob", (7, 0)),
        Case("mosaic:v=4", 80, 300, (2, 1), "t", (0,), value_dim=100),
        Case("mosaic:mean=0", 128, 300, (4, 2), "ob", (1, 0), (128, HALVES)),
        Case("mosaic:query=0", 128, 300, (4, 2), "ob", (0,), (128, HALVES)),
        Case("mosaic:search=0,hadamard=0", 64, 300, (4, 2), "ob", (0,), (64, HALVES)),
        Case("mosaic:hadamard=0,mean=0", 80, 300, (2, 1), "oczn", (64,), (80, ADJACENT)),
        Case("mosaic:tiers=0,k=5.5,fit=0", 80, 300, (2, 1), "obz", (0,), (80, HALVES)),
        Case("mosaic:guard=0.02", 64, 420, (4, 2), "ob", (7, 0), (64, HALVES)),
        Case("mosaic:guard=0.0001,query=0,k=2", 128, 300, (2, 1), "b", (0,), (128, HALVES)),
    ]
    for bits in ("1.5", "2.5", "3.25", "4"):
        cases.append(Case(f"mosaic:bits={bits}", 128, 150, (2, 1), "b", (0,), (128, HALVES)))
    cases.append(Case("mosaic:bits=2.5", 64, 300, (2, 1), "o", (0,), (64, HALVES), value_dim=80))
    # turboquant
    cases += [
        Case("turboquant:skip=0", 128, 300, (4, 2), "ob", every),
        Case("turboquant:skip=0", 80, 300, (2, 1), "ocz", (64,)),
        Case("turboquant:k=3,v=2,skip=0", 96, 300, (2, 2), "on", (7,)),
        Case("turboquant:k=2,v=8,skip=0", 64, 517, (2, 1), "obt", (0,)),
        Case("turboquant:k=1,v=1,skip=0,front=4,keep=9", 256, 300, (2, 1), "oz", (1, 0)),
        Case("turboquant", 64, 150, (2, 1), "o", (0,), layers=5, layer=2),
        Case("turboquant", 64, 150, (2, 1), "o", (0,), layers=5, layer=1),
        Case("turboquant:skip=1,v=3,params=bf16", 128, 150, (2, 1), "oc", (0,), layers=3, layer=1),
    ]
    # formats of llama.cpp
    for name in ("q8_0", "q4_0"):
        cases += [
            Case(name, 128, 300, (4, 2), "ob", every),
            Case(name, 80, 300, (2, 1), "ocznl", (64,)),
            Case(f"{name}:hadamard=1", 96, 300, (2, 2), "ob", (7,)),
            Case(f"{name}:front=4,keep=3", 64, 517, (2, 1), "etz", (0,)),
            Case(f"{name}:hadamard=1", 80, 300, (2, 1), "z", (0,)),
            Case(f"{name}:hadamard=1", 256, 150, (2, 1), "o", (0,)),
        ]
    return cases
