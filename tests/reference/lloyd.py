"""Lloyd-Max levels of the normal distribution, from their definition: each level is the mean of its cell, each border
lies in the middle of two levels."""

import functools
import math

import numpy as np

from narrow import F32


def density(x):
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def above(x):
    """Probability of a value above x."""
    return 0.5 * math.erfc(x / math.sqrt(2)) if math.isfinite(x) else 0.0


@functools.lru_cache(maxsize=None)
def positive_levels(count):
    """The positive half of 2 * count symmetric levels, ascending, in double."""
    level = [2.5 * (i + 0.5) / count for i in range(count)]
    moved = 1.0
    while moved > 1e-15:
        border = [0.0] + [0.5 * (a + b) for a, b in zip(level, level[1:])] + [math.inf]
        new = [(density(a) - density(b)) / (above(a) - above(b)) for a, b in zip(border, border[1:])]
        moved = max(abs(a - b) for a, b in zip(new, level))
        level = new
    return level


def levels(bits):
    """[2^bits] ascending, fp32."""
    half = np.asarray(positive_levels(1 << (bits - 1)), np.float64).astype(F32)
    return np.concatenate([-half[::-1], half])
