"""Pages in planes, by "Searched and fitted" in docs/numerics.md: a channel's half range and middle (keys), a token's step
and a channel's mean (values). All arithmetic is fp32 without fused steps."""

import numpy as np

from grids import HALF, ONE, ZERO, ends
from narrow import F32, SMALLEST_SCALE, f16_bits, f16_values

SIXTEENTHS = np.asarray([2.0 ** (-i / 16) for i in range(16)], np.float64).astype(F32)
SHRINKS = np.asarray([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], np.float64).astype(F32)
FIRST = {1: 5, 2: 4, 3: 3, 4: 2}  # the share that is looked at first, by bits; else the whole range
STEPS = np.asarray([0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041], np.float64).astype(F32)  # by bits


def under(unit, parts):
    """[256] what logarithms stand for: unit * 2^(-j / parts)."""
    sixteenths = np.arange(256) * (16 // parts)
    return (F32(unit) * SIXTEENTHS[sixteenths % 16]) * np.ldexp(ONE, -(sixteenths // 16)).astype(F32)


def logarithms(x, table):
    """The largest j whose value is not below x; 0 if there is none."""
    return np.maximum((table[:, None] >= x).sum(axis=0) - 1, 0).astype(np.uint16)  # the table falls


def whole_offsets(x):
    return np.clip(np.rint(x), F32(-127), F32(127))


def in_eight(x):
    """Sum along the first axis: eight parts, folded."""
    parts = np.zeros((8,) + x.shape[1:], F32)
    for i in range(x.shape[0]):
        parts[i % 8] = parts[i % 8] + x[i]
    parts = parts[:4] + parts[4:]
    parts = parts[:2] + parts[2:]
    return parts[0] + parts[1]


def in_order(x):
    total = np.zeros(x.shape[1:], F32)
    for one in x:
        total = total + one
    return total


def spread(x):
    """Mean and population variance along the first axis."""
    mean = in_order(x) / F32(len(x))
    away = x - mean
    return mean, in_order(away * away) / F32(len(x))


def walk(errors, start):
    """From `start` to the smaller shares while the error falls; if the first is no better, to the larger ones."""
    best = start
    for step in (1, -1):
        while 0 <= best + step < len(errors) and errors[best + step] < errors[best]:
            best += step
        if best != start:
            break
    return best


class Searched:
    """A page of keys [tokens][D] of which channel c gets bits[c]."""

    def __init__(self, x, bits, shrinks):
        low, high = ends(x)
        middle, half = HALF * high + HALF * low, HALF * high - HALF * low
        mean, variance = spread(x)
        middle, half = np.where(bits == 0, mean, middle), np.where(bits == 0, np.sqrt(variance), half)
        half = np.maximum(half, np.abs(middle) / F32(7.9))
        self.bits = bits
        self.unit = f16_bits(half.max())
        table = under(f16_values(self.unit), 8)
        tries = [self.tried(x, middle, logarithms(shrink * half, table), table) for shrink in SHRINKS[:shrinks]]
        chosen = [walk([t[0][c] for t in tries], min(FIRST.get(int(bits[c]), 0), shrinks - 1)) if bits[c] else 0
                  for c in range(len(bits))]
        at = np.arange(len(bits))
        self.log, self.offset, self.codes, self.decoded = (
            np.stack([t[1][part] for t in tries])[chosen, ..., at].T for part in range(4))

    def tried(self, x, middle, log, table):
        h = table[log]
        none = h < SMALLEST_SCALE
        offset = np.where(none, ZERO, whole_offsets(middle * (F32(16) / np.where(none, ONE, h))))
        centre = offset * (h / F32(16))
        top = ((1 << self.bits) - 1).astype(F32)
        coded = (self.bits != 0) & ~none
        s = np.where(coded, (F32(2) * h) / np.where(coded, top, ONE), ZERO)
        coded &= s >= SMALLEST_SCALE
        z = np.where(self.bits == 0, centre, centre - h)
        steps = (x - z) * np.where(coded, ONE / np.where(coded, s, ONE), ZERO)
        codes = np.where(coded, np.clip(np.rint(steps), ZERO, top), ZERO)
        decoded = z + s * codes
        error = (steps - codes) * (steps - codes)
        square = s * s
        return in_eight(error * error) * (square * square), (log, offset.astype(np.int16), codes.astype(np.uint16), decoded)


class Fitted:
    """A page of values [tokens][D]; the first `wide` channels have one bit more."""

    def __init__(self, x, bits, wide):
        tokens, dim = x.shape
        sums, squares = in_order(x), in_order(x * x)
        self.bits = np.where(np.arange(dim) < wide, bits + 1, bits)
        rms = np.sqrt(in_eight(squares) / F32(tokens * dim))
        mean_unit = f16_bits(rms / F32(16))
        m = f16_values(mean_unit)
        self.offset = np.zeros(dim, np.int16)
        if m > 0:
            self.offset = whole_offsets((sums / F32(tokens)) * (ONE / m)).astype(np.int16)
        mean = self.offset.astype(F32) * m
        x = x - mean
        step = STEPS[self.bits]
        middle = ((1 << self.bits) - 1).astype(F32) * HALF
        s = np.sqrt(in_eight((x * x).T) / F32(dim))
        for _ in range(2):
            level = (self.code(x, s, step, middle) - middle) * step
            along, size = in_eight((x * level).T), in_eight((level * level).T)
            s = np.where(along > 0, along / size, ZERO)
        step_unit = f16_bits(s.max())
        table = under(f16_values(step_unit), 16)
        self.log = logarithms(s, table)
        s = table[self.log]
        codes = self.code(x, s, step, middle)
        self.codes = codes.astype(np.uint16)
        self.decoded = mean + s[:, None] * ((codes - middle) * step)
        self.units = np.asarray([step_unit, mean_unit], np.uint16)

    def code(self, x, s, step, middle):
        none = s < SMALLEST_SCALE
        inverse = np.where(none, ZERO, ONE / np.where(none, ONE, s))
        return np.clip(np.rint(x * (inverse[:, None] * (ONE / step)) + middle), ZERO, F32(2) * middle)
