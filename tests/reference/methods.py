"""What each method decides, by docs/methods.md: stores, windows, transforms, plans.

A method is a class whose `side(side, head)` gives the fixed part of a plan, `freeze` what a sequence decides once, and
`plan` the ladder of a block. Heads, layers and sizes are those of the Shape that it is made with.
"""

import math

import numpy as np

from basis import Transform
from grids import Rule
from lloyd import levels
from narrow import F32

PAGE = 128


class Shape:
    """One layer's sizes, its rotation and where it stands in the model."""

    def __init__(self, heads, kv_heads, key_dim, value_dim=None, rope=None, layer=0, layers=1):
        self.heads, self.kv_heads = heads, kv_heads
        self.dims = {"key": key_dim, "value": value_dim or key_dim}
        self.rope, self.layer, self.layers = rope, layer, layers

    def pairs(self):
        """Units of the key's channels: rotary pairs, then what belongs to no pair."""
        dim = self.dims["key"]
        if self.rope is None:
            return [(c,) for c in range(dim)]
        a, b = self.rope.pairs()
        paired = list(zip(a.tolist(), b.tolist()))
        rest = sorted(set(range(dim)) - set(a.tolist()) - set(b.tolist()))
        return paired + [(c,) for c in rest]


class Window:
    def __init__(self, front=0, keep=0, flush=0, first=0):
        self.front, self.keep, self.flush, self.first = front, keep, flush, first

    def packed_after(self, packed, rows):
        waiting = rows - packed
        if self.flush == 0 or rows < self.first or waiting < self.keep + self.flush:
            return packed
        return packed + (waiting - self.keep) // self.flush * self.flush


class Side:
    """The plan of one KV head and side."""

    def __init__(self, window, rule=None, axis=None, edges=None, group=32, tiered=False, page_map=True, raw="f16"):
        self.window, self.rule, self.axis, self.group = window, rule, axis, group
        self.edges = edges  # first channel of each group, then D; channel groups only
        self.tiered, self.page_map, self.raw = tiered, page_map, raw
        self.transform = Transform()
        self.pre_rope = False
        self.centred, self.mean = False, None  # keys minus a mean that turns with the position
        self.shrinks = self.wide = 0  # pages in planes (planes.py)
        self.ladder = None  # tiered: [(bits, channels)], widest first
        self.pinned = []


def runs(dim, group):
    """Edges of groups of equal size; the last may be shorter."""
    return list(range(0, dim, group)) + [dim]


class Options:
    """Options of a spec with their defaults, as text."""

    def __init__(self, spec, defaults):
        self.values = dict(defaults)
        for part in filter(None, spec.partition(":")[2].split(",")):
            name, _, value = part.partition("=")
            if name not in self.values:
                raise ValueError(f"{spec}: the reference has no option {name}")
            self.values[name] = value

    def __getitem__(self, name):
        return self.values[name]

    def integer(self, name):
        return int(self.values[name])

    def real(self, name):
        return float(self.values[name])


class Method:
    """Fixed plans only. Subclasses say `defaults` and, where they decide something, `freezes`, `freeze`, `plan`."""

    defaults = {}
    uses_query = False
    query_sum = "magnitude"  # or "pair_norm", "square"

    def __init__(self, spec, shape, calibration=None):
        self.shape, self.calibration = shape, calibration
        self.o = Options(spec, self.defaults)

    def dim(self, side):
        return self.shape.dims[side]

    def params(self):
        return self.o["params"]

    def freezes(self, side):
        return False

    # Per-token groups of `group` channels; per-channel groups of `group` tokens.
    def per_token(self, side, window, rule, group):
        dim = self.dim(side)
        return Side(window, rule, "channels", runs(dim, min(group, dim)))

    def per_channel(self, window, rule, group):
        return Side(window, rule, "tokens", group=group)


class Raw(Method):
    def __init__(self, spec, shape, calibration=None):
        super().__init__(spec, shape, calibration)
        self.raw = spec

    def side(self, side, head):
        return Side(Window(), raw=self.raw)


class Kivi(Method):
    defaults = {"bits": "2", "residual": "128", "group": "32", "front": "0", "keep": "0", "params": "f16"}

    def side(self, side, head):
        o = self.o
        rule = Rule("asym", o.integer("bits"), self.params())
        front, keep, residual = o.integer("front"), o.integer("keep"), o.integer("residual")
        if side == "key":
            return self.per_channel(Window(front, keep, residual), rule, o.integer("group"))
        return self.per_token(side, Window(front, keep + residual, 1), rule, o.integer("group"))


def by_rank(score):
    """Channels by score, best first, ties by channel."""
    return np.argsort(-score, kind="stable")


def tiers(*parts):
    """[(bits, channels ascending)] without the empty ones."""
    return [(bits, np.sort(np.asarray(channels, np.int64))) for bits, channels in parts if len(channels)]


class MixKvq(Method):
    defaults = {"hi": "12", "mid": "1.6", "raw_share": "off", "mid_share": "off", "score": "product",
                "query": "running", "map": "block", "v": "2", "group": "32", "front": "4", "keep": "0",
                "params": "f16"}
    uses_query = True

    def side(self, side, head):
        o = self.o
        window = Window(o.integer("front"), o.integer("keep"), PAGE)
        if side == "key":
            rule = Rule("asym", 2, self.params())
            return Side(window, rule, "tokens", group=o.integer("group"), tiered=True)
        return self.per_token(side, window, Rule("asym", o.integer("v"), self.params()), o.integer("group"))

    def plan(self, rows, query_sum, query_count):
        """Ladder of a block of raw key rows [n][D]."""
        o = self.o
        scale = (rows.max(axis=0) - rows.min(axis=0)) / F32(3)
        score = scale
        if query_count:
            query = query_sum / F32(query_count)
            score = {"product": query * scale, "scale": scale, "query": query}[o["score"]]
        if o["raw_share"] != "off" or o["mid_share"] != "off":
            dim = rows.shape[1]
            shares = [0.0 if o[name] == "off" else o.real(name) for name in ("raw_share", "mid_share")]
            raw = min(dim, math.floor(shares[0] * dim + 0.5))
            mid = min(dim - raw, math.floor(shares[1] * dim + 0.5))
            ranked = by_rank(score)
            return tiers((16, ranked[:raw]), (4, ranked[raw : raw + mid]), (2, ranked[raw + mid :]))
        high = score > o.real("hi")
        middle = ~high & (score > o.real("mid"))
        return tiers(*((bits, np.flatnonzero(of)) for bits, of in ((16, high), (4, middle), (2, ~high & ~middle))))


class Kitty(Method):
    defaults = {"variant": "base", "ratio": "auto", "v": "2", "group": "128", "front": "32", "keep": "0",
                "params": "f16"}

    def side(self, side, head):
        o = self.o
        front, keep = o.integer("front"), o.integer("keep") + {"key": 0, "value": 128}[side]
        if side == "key":
            rule = Rule("asym", 2, self.params())
            return Side(Window(front, keep, PAGE), rule, "tokens", group=o.integer("group"), tiered=True)
        rule = Rule("asym", o.integer("v"), self.params())
        return self.per_token(side, Window(front, keep, PAGE), rule, o.integer("group"))

    def plan(self, rows, query_sum, query_count):
        o = self.o
        ratio = {"base": 0.125, "pro": 0.25}[o["variant"]] if o["ratio"] == "auto" else o.real("ratio")
        total = np.zeros(rows.shape[1], F32)
        for row in rows:
            total = total + np.abs(row)
        ranked, top = by_rank(total), math.floor(ratio * rows.shape[1])
        return tiers((4, ranked[:top]), (2, ranked[top:]))


class PnMix(Method):
    defaults = {"b_hi": "3", "b_lo": "1", "r": "0.5", "v": "2", "front": "32", "keep": "0", "group": "128",
                "params": "f16"}
    uses_query = True
    query_sum = "pair_norm"

    def freezes(self, side):
        return side == "key"

    def side(self, side, head):
        o = self.o
        front, keep = o.integer("front"), o.integer("keep")
        if side == "key":
            rule = Rule("midpoint", 1, self.params())
            window = Window(front, keep, PAGE, PAGE)
            return Side(window, rule, "tokens", group=o.integer("group"), tiered=True, page_map=False)
        rule = Rule("asym", o.integer("v"), self.params())
        return self.per_token(side, Window(front, keep, PAGE), rule, o.integer("group"))

    def freeze(self, plan, side, rows, front, query_sum, query_count):
        """rows [front + 128][D] raw keys; query_sum [D]: sums of pair norms."""
        o, dim = self.o, rows.shape[1]
        units = self.shape.pairs()
        total = np.zeros(len(units), F32)
        for row in rows:
            total = total + unit_norms(row, units)
        query = np.asarray([query_sum[unit[0]] for unit in units], F32)
        score = (query / F32(query_count)) * (total / F32(len(rows)))
        budget = 2 * math.floor(o.real("r") * dim / 2)
        chosen = []
        for i in sorted(range(len(units)), key=lambda i: (-score[i], min(units[i]))):
            if len(chosen) + len(units[i]) > budget:
                break
            chosen += units[i]
        chosen = sorted(chosen)
        rest = sorted(set(range(dim)) - set(chosen))
        plan.transform = Transform(order=chosen + rest)
        parts = [(o.integer("b_hi"), np.arange(len(chosen))), (o.integer("b_lo"), np.arange(len(chosen), dim))]
        plan.ladder = [part for part in parts if len(part[1])]


def unit_norms(row, units):
    """2-norm of each unit of a row; |x| of a single channel."""
    first = row[[unit[0] for unit in units]]
    second = row[[unit[-1] for unit in units]]
    single = np.asarray([len(unit) == 1 for unit in units])
    return np.where(single, np.abs(first), np.sqrt(first * first + second * second))


class InnerQ(Method):
    defaults = {"variant": "base", "asym": "1bit", "norm": "on", "front": "32", "keep": "96", "group": "32",
                "params": "f16"}

    def freezes(self, side):
        return side == "key" and self.o["norm"] == "on"

    def side(self, side, head):
        o = self.o
        front, keep, group = o.integer("front"), o.integer("keep"), o.integer("group")
        if side == "key":
            window = Window(front, keep, 1, PAGE)
            return self.per_token(side, window, Rule("symmetric", 3, self.params()), group)
        name, bits = {"base": ("symmetric", 3), "small": ("symmetric", 2),
                      "hybrid": ("hybrid_1bit" if o["asym"] == "1bit" else "hybrid_4level", 2)}[o["variant"]]
        return self.per_channel(Window(front, keep, 32), Rule(name, bits, self.params()), group)

    def freeze(self, plan, side, rows, front, query_sum, query_count):
        scale = np.sqrt(np.abs(rows[front:]).max(axis=0))
        plan.transform = Transform(scale=np.where(scale == 0, F32(1), scale))


class TurboQuant(Method):
    defaults = {"k": "4", "v": "4", "skip": "2", "front": "0", "keep": "0", "params": "f16"}

    def side(self, side, head):
        o, dim = self.o, self.dim(side)
        if min(self.shape.layer, self.shape.layers - 1 - self.shape.layer) < o.integer("skip"):
            return Side(Window())
        window = Window(o.integer("front"), o.integer("keep"), 1)
        if side == "value":
            return self.per_token(side, window, Rule("asym", o.integer("v"), self.params()), dim)
        bits = o.integer("k")
        plan = self.per_token(side, window, Rule("codebook_norm", bits, self.params(), book=levels(bits)), dim)
        plan.transform = Transform(run=dim)
        return plan


class Q8(Method):
    defaults = {"front": "0", "keep": "0", "hadamard": "0", "group": "32", "params": "f16"}
    rule, bits = "symmetric", 8

    def side(self, side, head):
        o = self.o
        window = Window(o.integer("front"), o.integer("keep"), 1)
        plan = self.per_token(side, window, Rule(self.rule, self.bits, self.params()), o.integer("group"))
        if o["hadamard"] == "1":
            plan.transform = Transform(run=self.dim(side))
        return plan


class Q4(Q8):
    rule, bits = "extreme", 4
