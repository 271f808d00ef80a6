"""What `mosaic` decides, by docs/methods.md: the mean of a head's keys, weights of channels, ladders, widths."""

import math

import numpy as np

from basis import Transform
from grids import Rule
from methods import PAGE, Method, Side, Window, by_rank, tiers
from narrow import F32, rounded
from planes import in_order, spread

LOW4, HIGH4 = 0, 1  # of (low4, high4, two, one)
DISTORTION = {8: 0.0000909, 6: 0.00104, 4: 0.01154, 3: 0.03744, 2: 0.1188, 1: 0.3634, 0: 1.0}
PRESETS = ((1.5, 2), (2, 2), (2, 2.5), (2.5, 3), (3, 3), (3.5, 4), (4.5, 5))
VECTOR = 32  # bytes


class Budget:
    """The best ladder of so many vectors for ranked weights."""

    def __init__(self, ranked):
        self.dim = len(ranked)
        self.w = [float(w) for w in ranked]
        self.sums = [0.0]
        for w in self.w:
            self.sums.append(self.sums[-1] + w)
        self.seen = {}

    def counts(self, vectors, six, three):
        """[(bits, channels)] in the order of ranks, cut where the channels end."""
        a, b, c, d = vectors
        wanted = ((8, 8 * b), (6, six), (4, 8 * a - 8 * b - six), (3, three), (2, 16 * c - six - three),
                  (1, 32 * d - three))
        left, found = self.dim, []
        for bits, channels in wanted:
            found.append((bits, min(channels, left)))
            left -= found[-1][1]
        return found + [(0, left)]

    def borders(self, vectors):
        a, b, c, d = vectors
        D, w, six, three = DISTORTION, self.w, 0, 0
        for _ in range(2):
            ones = 8 * a + 16 * c - six + 32 * d
            three = first_not(min(16 * c - six, 32 * d), lambda n, end=ones: (D[2] - D[3]) * w[8 * a + n + 2]
                              > (D[0] - D[1]) * w[end - n - 3])
            twos = 8 * a + 16 * c
            six = first_not(min(8 * a - 8 * b, 16 * c - three), lambda n, end=twos, t=three:
                            (D[4] - D[6]) * w[8 * b + n + 2]
                            > (D[1] - D[2]) * w[end - n - 3] + (D[0] - D[1]) * w[end - n + 32 * d - t - 3])
        return six, three

    def tried(self, vectors):
        """(error, ladder) of these vectors with their borders."""
        if vectors in self.seen:
            return self.seen[vectors]
        ladder, error, at = self.counts(vectors, *self.borders(vectors)), 0.0, 0
        for bits, channels in ladder:
            error += DISTORTION[bits] * (self.sums[at + channels] - self.sums[at])
            at += channels
        self.seen[vectors] = error, ladder
        return error, ladder

    def descend(self, vectors):
        best = (*self.tried(vectors), vectors)
        while True:
            found = best
            for moved in moves(best[2]):
                one = self.tried(moved)
                if one[0] < found[0]:
                    found = (*one, moved)
            if found is best:
                return best
            best = found

    def best(self, total):
        """(error, [(bits, channels)] by rank)."""
        self.w += [0.0] * (32 * total + self.dim - len(self.w))  # ranks that vectors reach beyond the last channel
        twos = min(total, -(-self.dim // 16))
        first, second = self.descend((total - twos, 0, twos, 0)), self.descend((total, 0, 0, 0))
        return (second if second[0] < first[0] else first)[:2]


def first_not(limit, holds):
    """The first multiple of 4 up to `limit` of which it does not hold, by halving; `limit` is taken untested."""
    low, high = 0, limit // 4
    while low < high:
        middle = (low + high) // 2
        if holds(4 * middle):
            low = middle + 1
        else:
            high = middle
    return 4 * low


def moves(vectors):
    """Every change of one vector from a plane to another, with a second from the same plane or alone."""
    for source in range(4):
        for to in range(4):
            if to == source:
                continue
            for second in (0, 1, 2, 3, None):
                if second == source:
                    continue
                moved = list(vectors)
                for target in (to, second):
                    if target is not None:
                        moved[source] -= 1
                        moved[target] += 1
                if moved[source] >= 0 and moved[HIGH4] <= moved[LOW4]:
                    yield tuple(moved)


def true_bits(shape, k, v):
    """Bits a number of sealed pages, by docs/format.md."""
    keys, values = shape.dims["key"], shape.dims["value"]
    key_bytes = vectors_of(k, keys) * (PAGE // 8) * VECTOR + 2 * keys + 2 + keys * (2 if keys > 256 else 1)
    blocks, wide = -(-values // 8), wide_of(v, values)
    value_bytes = (blocks * math.floor(v) + wide // 8) * PAGE + PAGE + values + 4
    total = sum(-(-size // 32) * 32 for size in (key_bytes, value_bytes))
    return 8 * total / (PAGE * (keys + values))


def vectors_of(k, dim):
    return max(1, math.floor(k * dim / 32))


def wide_of(v, dim):
    return math.floor((v - math.floor(v)) * dim) // 8 * 8


class Mosaic(Method):
    defaults = {"k": "2.5", "v": "3", "bits": "off", "guard": "0", "front": "4", "keep": "0", "tiers": "1",
                "query": "1", "mean": "1", "search": "1", "hadamard": "1", "fit": "1"}
    query_sum = "square"

    def __init__(self, spec, shape, calibration=None):
        super().__init__(spec, shape, calibration)
        o = self.o
        self.k, self.v = o.real("k"), o.real("v")
        self.uses_query = o["query"] == "1"
        if o["bits"] != "off":
            counted = [(true_bits(shape, *preset), preset) for preset in PRESETS]
            fitting = [one for one in counted if one[0] <= o.real("bits")]
            self.k, self.v = max(fitting)[1] if fitting else PRESETS[0]

    def freezes(self, side):
        return side == "key" and self.o["mean"] == "1"

    def side(self, side, head):
        o, dim = self.o, self.dim(side)
        front, keep = o.integer("front"), o.integer("keep")
        if side == "key":
            centred = o["mean"] == "1"
            plan = Side(Window(front, keep, PAGE, PAGE if centred else 0), Rule("searched", 0), tiered=True)
            plan.centred = centred
            plan.shrinks = 7 if o["search"] == "1" else 1
            return plan
        window = Window(front, keep, PAGE)
        if o["fit"] == "1":
            plan = Side(window, Rule("fitted", math.floor(self.v)))
            plan.wide = wide_of(self.v, dim)
        else:
            plan = self.per_token(side, window, Rule("asym", math.floor(self.v)), dim)
        if o["hadamard"] == "1":
            plan.transform = Transform(run=dim)
        return plan

    def freeze(self, plan, side, rows, front, query_sum, query_count):
        """rows: the first front + 128 keys turned back."""
        plan.mean = rounded("f16", in_order(rows) / F32(len(rows)))

    def plan(self, rows, query_sum, query_count):
        dim = rows.shape[1]
        if self.o["tiers"] == "0":
            bits = math.floor(self.k)
            return tiers((bits - 1 if bits in (5, 7) else bits, np.arange(dim)))
        variance = spread(rows)[1]
        square = query_sum / F32(query_count) if query_count else np.ones(dim, F32)
        weight = (square * variance) / F32(dim)
        ranked = by_rank(weight)
        budget, total = Budget(weight[ranked]), vectors_of(self.k, dim)
        error, counts = budget.best(total)
        for more in range(1, -(-2 * dim // 32) + 1):
            if not 0 < self.o.real("guard") < error:
                break
            error, counts = budget.best(total + more)
        parts, at = {}, 0
        for bits, channels in counts:
            parts[bits] = ranked[at : at + channels]
            at += channels
        return tiers(*((bits, parts[bits]) for bits in (8, 4, 6, 2, 3, 1, 0)))
