"""An encoder of pages in planes, by "Searched and fitted" in docs/numerics.md and "Pages in planes" in docs/format.md."""

import functools
import math

from floats import channel_at, encode_float, round_even, rounded
from kvpage_reader import PAGE_TOKENS, STEPS, f32, power


def sum_of(values):
    total = 0.0
    for x in values:
        total = f32(total + x)
    return total


def in_eight(values):
    """Sum in eight parts, folded."""
    part = [sum_of(values[i::8]) for i in range(8)]
    for half in (4, 2, 1):
        for i in range(half):
            part[i] = f32(part[i] + part[i + half])
    return part[0]


@functools.lru_cache(maxsize=4)
def falling(unit, sixteenths):
    return [f32(unit * power(j * sixteenths)) for j in range(256)]


def logarithm(unit, x, sixteenths):
    """The largest j with unit * 2^(-j * sixteenths / 16) >= x, or 0."""
    return max(sum(value >= x for value in falling(unit, sixteenths)) - 1, 0)


def whole_offset(x):
    return max(-127, min(127, round_even(x)))


def code_at(x, middle, top):
    return max(0, min(top, round_even(f32(x + middle))))


SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
FIRST_SHARE = {1: 5, 2: 4, 3: 3, 4: 2, 6: 0, 8: 0}


def under_share(share, x, bits, middle, half, unit):
    """Error, logarithm, offset and codes of a channel under one share of its range."""
    top = (1 << bits) - 1
    log = logarithm(unit, f32(f32(share) * half), 2)
    h = f32(unit * power(2 * log))
    offset = whole_offset(f32(middle * f32(16.0 / h)))
    if bits == 0:
        return 0.0, log, offset, [0] * len(x)
    scale, zero = f32(f32(2.0 * h) / top), f32(f32(offset * f32(h / 16.0)) - h)
    steps = [f32(f32(one - zero) * f32(1.0 / scale)) for one in x]
    codes = [code_at(step, 0.0, top) for step in steps]
    squares = [f32(f32(step - code) ** 2) for step, code in zip(steps, codes)]
    error = in_eight([f32(square * square) for square in squares])
    return f32(error * f32(f32(scale * scale) ** 2)), log, offset, codes


def search(x, bits, middle, half, unit, shrinks):
    """Logarithm, offset and codes of a channel of a searched page."""
    tries = [under_share(share, x, bits, middle, half, unit) for share in SHARES[: shrinks if bits else 1]]
    best = first = min(FIRST_SHARE[bits], len(tries) - 1) if bits else 0
    while best + 1 < len(tries) and tries[best + 1][0] < tries[best][0]:
        best += 1
    while best <= first and best > 0 and tries[best - 1][0] < tries[best][0]:
        best -= 1
    return tries[best][1:]


def encode_keys(page, layout, rows, data, put):
    ranges, count = [], float(PAGE_TOKENS)
    columns = [[row[channel_at(p, layout.dim)] for row in rows] for p in range(layout.dim)]
    for x, bits in zip(columns, layout.bits):
        middle, half = f32(0.5 * max(x) + 0.5 * min(x)), f32(0.5 * max(x) - 0.5 * min(x))
        if bits == 0:
            middle = f32(sum_of(x) / count)
            half = f32(math.sqrt(f32(sum_of(f32(f32(one - middle) ** 2) for one in x) / count)))
        ranges.append((middle, max(half, f32(abs(middle) / f32(7.9)))))
    unit = rounded("f16", max(half for _, half in ranges))
    data[layout.unit_offset : layout.unit_offset + 2] = encode_float("f16", unit)
    for p, (x, bits, (middle, half)) in enumerate(zip(columns, layout.bits, ranges)):
        log, offset, codes = search(x, bits, middle, half, unit, page.get("shrinks", 7))
        data[layout.scale_offset + p], data[layout.zero_offset + p] = log, offset & 255
        for token, code in enumerate(codes):
            put(bits, token, p, code)


def encode_values(page, layout, rows, data, put):
    dim = layout.dim
    steps, middles = [f32(STEPS[bits]) for bits in layout.bits], [((1 << bits) - 1) / 2 for bits in layout.bits]
    squares = [sum_of(f32(row[c] * row[c]) for row in rows) for c in range(dim)]
    mean_unit = rounded("f16", f32(f32(math.sqrt(f32(in_eight(squares) / (PAGE_TOKENS * dim)))) / 16.0))
    means = []
    for c in range(dim):
        offset = whole_offset(f32(f32(sum_of(row[c] for row in rows) / PAGE_TOKENS) * f32(1.0 / mean_unit)))
        data[layout.zero_offset + c] = offset & 255
        means.append(f32(offset * mean_unit))
    rows = [[f32(x - mean) for x, mean in zip(row, means)] for row in rows]

    def codes_of(row, s):
        inverse = [f32(f32(1.0 / s) * f32(1.0 / step)) if s else 0.0 for step in steps]
        return [code_at(f32(x * by), middle, int(2 * middle)) for x, by, middle in zip(row, inverse, middles)]

    fitted = []
    for row in rows:
        s = f32(math.sqrt(f32(in_eight([f32(x * x) for x in row]) / dim)))
        for _ in range(2):
            levels = [f32((code - middle) * step) for code, middle, step in zip(codes_of(row, s), middles, steps)]
            along = in_eight([f32(x * level) for x, level in zip(row, levels)])
            s = f32(along / in_eight([f32(level * level) for level in levels])) if along > 0 else 0.0
        fitted.append(s)
    unit = rounded("f16", max(fitted))
    data[layout.unit_offset : layout.unit_offset + 4] = encode_float("f16", unit) + encode_float("f16", mean_unit)
    for token, (row, s) in enumerate(zip(rows, fitted)):
        data[layout.scale_offset + token] = log = logarithm(unit, s, 1)
        for c, code in enumerate(codes_of(row, f32(unit * power(log)))):
            put(layout.bits[c], c, token, code)


def encode_planes(page, layout, rows):
    """A page in planes, but for its map."""
    data = bytearray(layout.bytes)

    def put(bits, lane, depth, code):
        for byte, shift, width, weight in layout.plane_sites(bits, lane, depth):
            data[byte] |= (code >> weight & (1 << width) - 1) << shift

    (encode_keys if layout.key else encode_values)(page, layout, rows, data, put)
    return data
