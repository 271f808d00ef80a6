"""The methods that read a calibration file, by docs/methods.md."""

import numpy as np

from basis import Transform
from grids import Rule
from methods import PAGE, Method, Side, Window, runs


class Calibration:
    """Arrays of a calibration file by (name, layer, head, side); -1 stands for all."""

    def __init__(self, method):
        self.method, self.arrays = method, {}

    def add(self, name, layer, head, side, values):
        self.arrays[name, layer, head, side] = np.asarray(values)

    def __call__(self, name, layer, head, side):
        return self.arrays[name, layer, head, side]

    def text(self, shape, tokens=4096):
        """The file."""
        lines = ["kvmosaic-calibration 1", f"method {self.method}", "model unknown", f"layers {shape.layers}"]
        sizes = f"{shape.heads} {shape.kv_heads} {shape.dims['key']} {shape.dims['value']}"
        lines += [f"layer {i} {sizes}" for i in range(shape.layers)]
        lines += [f"tokens {tokens}", "text seeded"]
        for (name, layer, head, side), values in self.arrays.items():
            numbers = " ".join("%.9g" % x for x in values)
            lines.append(f"array {name} {layer} {head} {side} {len(values)} {numbers}")
        data = ("\n".join(lines) + "\n").encode()
        checksum = 0xCBF29CE484222325
        for byte in data:  # FNV-1a
            checksum = (checksum ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
        return data + f"checksum {checksum:016x}\n".encode()


class KvTuner(Method):
    defaults = {"calib": "", "base": "kivi", "group": "32", "residual": "32", "front": "0", "keep": "0",
                "params": "f16"}

    def side(self, side, head):
        o = self.o
        key_bits, value_bits = self.calibration("bits", self.shape.layer, -1, "key")
        rule = Rule("integer", int(key_bits if side == "key" else value_bits), self.params())
        front, keep, residual = o.integer("front"), o.integer("keep"), o.integer("residual")
        if o["base"] == "token":
            return self.per_token(side, Window(front, keep, 1), rule, self.dim(side))
        if side == "key":
            return self.per_channel(Window(front, keep, residual), rule, o.integer("group"))
        return self.per_token(side, Window(front, keep + residual, 1), rule, o.integer("group"))


class KvQuant(Method):
    defaults = {"calib": "", "bits": "3", "outliers": "0.01", "front": "1", "keep": "0", "params": "f16"}

    def side(self, side, head):
        o, dim, layer = self.o, self.dim(side), self.shape.layer
        share, bits = o.real("outliers"), o.integer("bits")
        count = max(1, int(share * dim + 0.5)) if share > 0 else 0
        book = self.calibration(f"book{bits}", layer, -1, side)
        name = "codebook_fixed" if side == "key" else "codebook_range"
        rule = Rule(name, bits, self.params(), book=book, outliers=count)
        plan = Side(Window(o.integer("front"), o.integer("keep"), 1), rule, "channels", runs(dim, dim))
        if side == "key":
            plan.pre_rope = True
            plan.transform = Transform(shift=self.calibration("shift", layer, head, side),
                                       scale=self.calibration("scale", layer, head, side))
        return plan


class RotateKv(Method):
    defaults = {"calib": "", "bits": "2", "pins": "20", "front": "0", "keep": "0", "params": "f16"}

    def freezes(self, side):
        return self.o.integer("pins") > 0

    def side(self, side, head):
        o, dim, heads = self.o, self.dim(side), self.shape.kv_heads
        bits = o.integer("bits")
        rule = Rule("integer", bits, self.params(), clip=0.8 if bits == 2 else 1.0)
        window = Window(o.integer("front"), o.integer("keep"), 1, PAGE)
        plan = self.per_token(side, window, rule, min(dim, 128) if side == "key" else dim)
        plan.transform = Transform(run=dim)
        if side == "key":
            plan.pre_rope = True
            together = max(j for j in (1, 2, 4) if heads % j == 0)
            order = self.calibration("order", self.shape.layer, -1, "key")
            plan.transform = Transform(joined=heads, run=together * dim, order=order)
        return plan

    def freeze(self, plan, side, rows, front, query_sum, query_count):
        beyond = rows[front:]
        span = beyond.max(axis=1) - beyond.min(axis=1)
        plan.pinned = sorted(np.argsort(-span, kind="stable")[: self.o.integer("pins")].tolist())


class Skvq(Method):
    defaults = {"calib": "", "k": "2", "v": "2", "group": "128", "across": "0", "clip": "0.92", "front": "5",
                "keep": "0", "params": "f8e4m3"}

    def side(self, side, head):
        o, dim, heads = self.o, self.dim(side), self.shape.kv_heads
        width = o["k" if side == "key" else "v"]
        bits, levels = (2, 3) if width == "1.5" else (int(width), 0)
        rule = Rule("asym", bits, self.params(), levels, o.real("clip"))
        window = Window(o.integer("front"), 128 + o.integer("keep"), 1)
        layer, across = self.shape.layer, o["across"] == "1"
        suffix = o["group"] + ("x" if across else "")
        order = self.calibration("order" + suffix, layer, -1 if across else head, side)
        edges = [int(e) for e in self.calibration("edges" + suffix, layer, -1 if across else head, side)]
        if across:  # the clusters that reach into this head's page, cut at its borders
            first, last = head * dim, (head + 1) * dim
            edges = [first] + [e for e in edges if first < e < last] + [last]
            edges = [e - first for e in edges]
        plan = Side(window, rule, "channels", edges)
        plan.transform = Transform(joined=heads if across else 1, order=order)
        return plan
