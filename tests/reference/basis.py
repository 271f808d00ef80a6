"""The basis in which channels are packed, by "Transforms" in docs/numerics.md."""

import math

import numpy as np

from narrow import F32


class Rope:
    """Rotary embedding. Pairs are (i, i + rotary/2) with `halves`, else (2i, 2i + 1); the rest passes through."""

    def __init__(self, rotary, halves=True, base=10000.0, freq_scale=1.0, factors=None, yarn=None):
        self.rotary, self.halves, self.base, self.freq_scale = rotary, halves, base, freq_scale
        self.factors = None if factors is None else np.asarray(factors, F32)
        self.yarn = yarn  # (ext_factor, beta_fast, beta_slow, original_context) or None

    def pairs(self):
        half = self.rotary // 2
        first = np.arange(half) if self.halves else 2 * np.arange(half)
        return first, first + (half if self.halves else 1)

    def angles(self):
        """Radians a position, of each pair; double."""
        result = []
        for i in range(self.rotary // 2):
            angle = float(F32(self.base)) ** (-2.0 * i / self.rotary)
            if self.factors is not None:
                angle /= float(self.factors[i])
            stretched = angle * float(F32(self.freq_scale))
            if self.yarn and self.yarn[0]:
                keep = self.ramp(i) * self.yarn[0]
                stretched = stretched * (1 - keep) + angle * keep
            result.append(stretched)
        return result

    def ramp(self, i):
        """Share of the unstretched frequency: 1 for pairs that turn more than beta_fast times in the context (YaRN)."""
        _, fast, slow, context = self.yarn

        def place(turns):
            return self.rotary * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = max(0.0, math.floor(place(fast))), min(self.rotary - 1.0, math.ceil(place(slow)))
        return 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))

    def turn(self, rows, positions, back):
        """Rows of one page [n][D] turned by their positions: that of the first row times the difference, in double."""
        first = int(positions[0])
        a, b = self.pairs()
        rows = np.array(rows, F32)
        cos, sin = np.empty((len(rows), len(a)), F32), np.empty((len(rows), len(a)), F32)
        for i, angle in enumerate(self.angles()):
            c0, s0 = math.cos(angle * first), math.sin(angle * first)
            for t, position in enumerate(positions):
                away = angle * (int(position) - first)
                c, s = math.cos(away), math.sin(away)
                cos[t, i], sin[t, i] = c0 * c - s0 * s, s0 * c + c0 * s
        if back:
            sin = -sin
        x, y = rows[:, a], rows[:, b]
        rows[:, a], rows[:, b] = x * cos - y * sin, x * sin + y * cos
        return rows


    def turn_mean(self, mean, positions):
        """R_t mean for each row of a page, from fp32 tables ("Centred keys" in docs/numerics.md)."""
        first = int(positions[0])
        a, b = self.pairs()
        angles = self.angles()

        def table(step, n):
            away = [angle * (step * n) for angle in angles]
            return [np.asarray([turn(x) for x in away]).astype(F32) for turn in (math.cos, math.sin)]

        def composed(x, y):
            return x[0] * y[0] - x[1] * y[1], x[1] * y[0] + x[0] * y[1]

        def by(position):
            low, middle, high = position % 128, position % 8192 // 128, position // 8192
            return composed(composed(table(1, low), table(128, middle)), table(8192, high))

        def applied(turn, x):
            x = np.array(x, F32)
            p, q = x[a], x[b]
            x[a], x[b] = p * turn[0] - q * turn[1], p * turn[1] + q * turn[0]
            return x

        start = applied(by(first), mean)
        return np.stack([applied(table(1, t - first), start) if t - first < 128 else applied(by(t), mean)
                         for t in map(int, positions)])


def hadamard(rows):
    """Walsh-Hadamard of each row [..., n]; a length that is no power of two is cut, largest power first."""
    rows = np.array(rows, F32)
    n, at = rows.shape[-1], 0
    while at < n:
        size = 1 << ((n - at).bit_length() - 1)
        block, h = rows[..., at : at + size], 1
        while h < size:
            pairs = block.reshape(block.shape[:-1] + (size // (2 * h), 2, h))
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            block = np.stack([a + b, a - b], axis=-2).reshape(block.shape)
            h *= 2
        rows[..., at : at + size] = block * F32(1.0 / math.sqrt(size))
        at += size
    return rows


class Transform:
    """hadamard in runs, (x - shift) / scale, order; over rows of `joined` heads side by side."""

    def __init__(self, joined=1, run=0, shift=None, scale=None, order=None):
        self.joined, self.run = joined, run
        self.shift = None if shift is None else np.asarray(shift, F32)
        self.scale = None if scale is None else np.asarray(scale, F32)
        self.order = None if order is None else np.asarray(order, np.int64)

    def in_runs(self, rows):
        if not self.run:
            return rows
        cut = rows.reshape(rows.shape[:-1] + (-1, self.run))
        return hadamard(cut).reshape(rows.shape)

    def forward(self, rows):
        rows = self.in_runs(np.asarray(rows, F32))
        if self.shift is not None:
            rows = rows - self.shift
        if self.scale is not None:
            rows = rows / self.scale
        return rows if self.order is None else rows[..., self.order]

    def inverse(self, rows):
        if self.order is not None:
            back = np.empty_like(rows)
            back[..., self.order] = rows
            rows = back
        if self.scale is not None:
            rows = rows * self.scale
        if self.shift is not None:
            rows = rows + self.shift
        return self.in_runs(rows)
