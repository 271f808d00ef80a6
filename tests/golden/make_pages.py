#!/usr/bin/env python3
"""Writes tests/golden/pages.txt: sizes and CRC-32 of pages that every encoder must make.

An encoder of its own, by docs/numerics.md and the offsets of docs/reader/kvpage_reader.py; it runs no code of the
library. Run it again only when the format changes on purpose, and say so in the changelog:

    python3 tests/golden/make_pages.py > tests/golden/pages.txt
"""

import math
import os
import struct
import sys
import zlib

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "reader"))
from kvpage_reader import IN_PLANES, PAGE_TOKENS, SIZES, STEPS, Layout, f32, power, read_float  # noqa: E402

MASK = (1 << 64) - 1


def rows_of(dim):
    """The golden input [128][dim]: multiples of 1/256 that f16 holds exactly, with two constant runs."""
    state, rows = 1, []
    for t in range(PAGE_TOKENS):
        row = []
        for c in range(dim):
            state = (state + 0x9E3779B97F4A7C15) & MASK  # splitmix64
            x = state
            x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
            x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
            x ^= x >> 31
            value = ((x >> 40) % 4096 - 2048) / 256.0 * (8 if c % 7 == 3 else 1)
            if t == 9:
                value = 1.5
            if c == 5 and 32 <= t < 64:
                value = -0.75
            row.append(value)
        rows.append(row)
    return rows


def channel_at(position, dim):
    return (position * 37 + 11) % dim


def round_even(x):
    return round(x)  # Python rounds half to even


def encode_float(kind, x):
    """Bytes of x, half to even; the golden inputs overflow no type but f8e4m3, which saturates."""
    if kind == "f16":
        return struct.pack("<e", x)
    if kind == "bf16":
        bits = struct.unpack("<I", struct.pack("<f", x))[0]
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    codes = range(0x7F)
    magnitude = min(abs(x), 448.0)
    # The nearest of the 127 finite magnitudes; of two, the even code.
    best = min(codes, key=lambda c: (abs(read_float("f8e4m3", bytes([c]), 0, 0) - magnitude), c & 1))
    return bytes([best | (0x80 if struct.pack("<f", x)[3] & 0x80 else 0)])


def rounded(kind, x):
    return read_float(kind, encode_float(kind, x), 0, 0)


LARGEST = {"f16": 65504.0, "bf16": float.fromhex("0x1.FEp127"), "f8e4m3": 448.0}


def grid(rule, kind, bits, levels, clip, values):
    """One group under a rule that needs no more than the range: stored scale and offset, codes, decoded values."""
    low, high = min(values) + 0.0, max(values) + 0.0
    middle = low if low == high else f32(0.5 * low + 0.5 * high)
    if clip != 1.0:
        low, high = f32(low * f32(clip)), f32(high * f32(clip))
    top = levels - 1 if levels else (1 << bits) - 1
    steps = 1 if levels else (1 << bits >> 1) - 1
    zero = None
    if rule == "symmetric":
        scale = rounded(kind, f32(max(abs(low), abs(high)) / steps))
        zero, base, top = f32(-steps * scale), steps, 2 * steps
    elif rule == "extreme":
        base = 1 << bits >> 1
        scale = rounded(kind, f32((low if -low > high else high) / -base))
        zero = f32(-base * scale)
    else:
        parts = 2 if rule == "midpoint" and bits == 1 else top
        scale = rounded(kind, f32(f32(high - low) / parts)) if bits else 0.0
        if rule == "integer" and scale:
            scale = max(scale, rounded(kind, f32(abs(low) / f32(0.5 * LARGEST[kind]))))
    inverse = f32(1.0 / scale) if scale else 0.0
    if zero is not None:
        stored_zero = None
        scale = scale or 0.0
        codes = [max(0, min(top, round_even(f32(x * inverse)) + base)) for x in values]
    else:
        if scale == 0.0:
            zero = stored_zero = rounded(kind, middle)
        elif rule == "midpoint" and bits == 1:
            zero = stored_zero = rounded(kind, f32(f32(0.75 * low) + f32(0.25 * high)))
        elif rule == "integer":
            stored_zero = rounded(kind, float(round_even(f32(low / scale))))
            zero = f32(scale * stored_zero)
        else:
            zero = stored_zero = rounded(kind, low)
        codes = [max(0, min(top, round_even(f32(f32(x - zero) * inverse)))) for x in values]
    return scale, stored_zero, codes, [f32(zero + f32(scale * code)) for code in codes]


def norm(values):
    part = [0.0] * 8
    for i, x in enumerate(values):
        part[i % 8] = f32(part[i % 8] + f32(x * x))
    for half in (4, 2, 1):
        for i in range(half):
            part[i] = f32(part[i] + part[i + half])
    return f32(math.sqrt(part[0]))


def nearest(book, y):
    return sum(y > f32(0.5 * f32(a + b)) for a, b in zip(book, book[1:]))


def fit(page, bits, values, apart):
    """Stored scale, stored offset and codes of one group under any rule. apart: indices that are kept as outliers."""
    rule, kind, book = page.get("rule", "asym"), page["params"], page.get("book")
    levels, clip = page.get("levels", 0), page.get("clip", 1.0)
    if rule.startswith("hybrid"):
        even = grid("symmetric", kind, bits, levels, clip, values)
        ends = grid("asym", kind, 1 if rule == "hybrid_1bit" else bits, levels, clip, values)
        errors = []
        for candidate in (even, ends):
            total = 0.0
            for x, y in zip(values, candidate[3]):
                total = f32(total + abs(f32(y - x)))
            errors.append(total)
        if errors[0] < errors[1]:
            return even[0], 0.0, even[2]
        return -ends[0], ends[1], ends[2]
    if rule == "codebook_norm":
        length = norm(values)
        if length == 0.0:
            return 0.0, None, [0] * len(values)
        unit = f32(f32(math.sqrt(len(values))) / length)
        codes = [nearest(book, f32(x * unit)) for x in values]
        return rounded(kind, f32(length / norm([book[code] for code in codes]))), None, codes
    if rule == "codebook_range":
        kept = [x for i, x in enumerate(values) if i not in apart] or [0.0]
        low, high = f32(0.5 * (min(kept) + 0.0)), f32(0.5 * (max(kept) + 0.0))
        scale, zero = rounded(kind, f32(high - low)), rounded(kind, f32(high + low))
        if scale == 0.0:
            return scale, zero, [0] * len(values)
        inverse = f32(1.0 / scale)
        return scale, zero, [nearest(book, f32(f32(x - zero) * inverse)) for x in values]
    if rule == "codebook_fixed":
        return None, None, [nearest(book, x) for x in values]
    return grid(rule, kind, bits, levels, clip, values)[:3]


def outliers_of(page, row):
    """Channels of a token that are kept apart, ascending."""
    fixed, left, found = page["rule"] == "codebook_fixed", list(range(len(row))), []
    for i in range(page.get("outliers", 0)):
        if fixed:
            left = [c for c in left if abs(row[c]) > 1.0]
        if not left:
            break
        key = (lambda c: abs(row[c])) if fixed else (lambda c: row[c]) if i % 2 == 0 else (lambda c: -row[c])
        found.append(max(left, key=key))  # of equal ones the first, which is the lowest channel
        left.remove(found[-1])
    return sorted(found)


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


def logarithm(unit, x, sixteenths):
    """The largest j with unit * 2^(-j * sixteenths / 16) >= x, or 0."""
    return max((j for j in range(256) if f32(unit * power(j * sixteenths)) >= x), default=0)


def whole_offset(x):
    return max(-127, min(127, round_even(x)))


def code_at(x, middle, top):
    return max(0, min(top, round_even(f32(x + middle))))


def search(x, bits, middle, half, unit, shrinks):
    """Logarithm, offset and codes of a channel of a searched page."""
    best, top = None, (1 << bits) - 1
    for shrink in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)[: shrinks if bits else 1]:
        log = logarithm(unit, f32(f32(shrink) * half), 2)
        h = f32(unit * power(2 * log))
        offset = whole_offset(f32(middle * f32(16.0 / h)))
        scale, codes, error = f32(f32(2.0 * h) / top) if bits else 0.0, [0] * len(x), 0.0
        zero = f32(f32(offset * f32(h / 16.0)) - h)
        if bits:
            codes = [code_at(f32(f32(one - zero) * f32(1.0 / scale)), 0.0, top) for one in x]
            squares = [f32(f32(one - f32(zero + f32(scale * code))) ** 2) for one, code in zip(x, codes)]
            error = sum_of(f32(square * square) for square in squares)
        if best is None or error < best[0]:
            best = error, log, offset, codes
    return best[1:]


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


def put_map(layout, data):
    for position in range(layout.dim if layout.map_element else 0):
        at = layout.map_offset + position * layout.map_element
        data[at : at + layout.map_element] = channel_at(position, layout.dim).to_bytes(layout.map_element, "little")
    return bytes(data)


def encode(page, rows):
    layout, dim = Layout(page), page["dim"]
    if layout.rule in IN_PLANES:
        return put_map(layout, encode_planes(page, layout, rows))
    data = bytearray(layout.bytes)

    def put_float(kind, offset, index, x):
        at = offset + index * SIZES[kind]
        data[at : at + SIZES[kind]] = encode_float(kind, x)

    def value(lane, position):
        if layout.key:
            return rows[lane][channel_at(position, dim) if layout.map_element else position]
        return rows[position][lane]

    for position in range(layout.raw_depth):
        for lane in range(layout.lanes):
            put_float("f16", layout.raw_offset, position * layout.lanes + lane, value(lane, position))

    def put_group(tier, bits, sites, group, column, apart=()):
        """sites: (lane, position in the tier, ladder position) of the group's values, in order."""
        scale, offset, codes = fit(page, bits, [value(lane, p) for lane, _, p in sites], apart)
        at = group * layout.columns + column
        if layout.has_scales:
            put_float(layout.params, layout.scale_offset, at, scale)
        if layout.has_offsets:
            put_float(layout.params, layout.zero_offset, at, offset)
        for code, (lane, in_tier, _) in zip(codes, sites):
            if tier and layout.levels:
                data[lane // 8 * layout.block_bytes + in_tier // 5 * 8 + lane % 8] += code * 3 ** (in_tier % 5)
            elif tier:
                for byte, shift, width, weight in layout.sites(tier, lane, in_tier):
                    data[byte] |= (code >> weight & (1 << width) - 1) << shift

    apart = [outliers_of(page, row) for row in rows] if layout.store == "codebook" else [()] * len(rows)
    for token, channels in enumerate(apart):
        slots = [(c, rows[token][c]) for c in channels]
        slots += [(0xFFFF, 0.0)] * (layout.outliers - len(slots))
        for i, (channel, x) in enumerate(slots):
            at = layout.outlier_offset + 4 * (token * layout.outliers + i)
            data[at : at + 4] = struct.pack("<He", channel, x)
    groups = [[i for i, g in enumerate(layout.group_of) if g == group] for group in range(layout.groups)]
    if layout.along_depth:
        for lane in range(layout.lanes):
            for group, run in enumerate(groups):
                out = [run.index(c) for c in apart[lane] if c in run] if layout.key else ()
                put_group(layout.tiers[0], layout.tiers[0][0], [(lane, p, p) for p in run], group, lane, out)
    else:
        spans = [(t, p, t[3] + p, t[4] + p) for t in layout.tiers for p in range(t[1])]
        first_zero = layout.columns - layout.zero_bits
        spans += [(None, i, dim - layout.zero_bits + i, first_zero + i) for i in range(layout.zero_bits)]
        for tier, in_tier, position, column in spans:
            for group, run in enumerate(groups):
                out = () if layout.key else [run.index(c) for c in apart[position] if c in run]
                sites = [(lane, in_tier, position) for lane in run]
                put_group(tier, tier[0] if tier else 0, sites, group, column, out)
    return put_map(layout, data)


def cases():
    for dim in (64, 80, 96, 100, 128):
        for bits in (1, 2, 3, 4, 6, 8):
            for side in ("key", "value"):
                yield side, "grid", dim, 32, "f16", str(bits)
        eighth = dim // 8
        for group in (32, 128):
            yield "key", "tiered", dim, group, "f16", f"16x{eighth},4x{2 * eighth},2x{dim - 3 * eighth}"
    for side in ("key", "value"):
        for bits in (2, 4):
            yield side, "grid", 128, 128, "f16", str(bits)
        for params in ("bf16", "f8e4m3"):
            yield side, "grid", 100, 64, params, "3"
        yield side, "grid", 20, 48, "f16", "2"
    yield "key", "tiered", 64, 128, "f16", "3x32,1x32"
    yield "key", "tiered", 100, 40, "bf16", "16x3,8x5,6x7,4x9,3x11,2x13,1x15,0x37"
    yield "key", "tiered", 100, 32, "f8e4m3", "8x1,6x1,3x1,0x97"
    yield "key", "tiered", 257, 128, "f8e4m3", "16x2,2x254,0x1"
    yield "key", "tiered", 300, 128, "f16", "4x50,2x250"


BOOKS = {
    1: "-0.75,0.9375",
    2: "-1.5,-0.4375,0.5,1.625",
    3: "-2.125,-1.3125,-0.75,-0.25,0.1875,0.6875,1.375,2.25",
    4: "-2.75,-2.0625,-1.625,-1.25,-0.9375,-0.6875,-0.40625,-0.125,"
    "0.15625,0.375,0.65625,0.96875,1.25,1.59375,2.09375,2.6875",
}


def rule_cases():
    """(side, store, dim, group, params, widths, {what differs}) of the other rules, axes and kinds."""
    other = {"key": "channels", "value": "tokens"}
    for side in ("key", "value"):
        for bits in (1, 2, 3, 4, 6, 8):
            yield side, "grid", 100, 32, "f16", str(bits), {"axis": other[side]}
        for rule in ("integer", "symmetric", "extreme", "hybrid_1bit", "hybrid_4level", "midpoint"):
            for axis in ("tokens", "channels"):
                for bits in (1, 2, 4):
                    if bits == 1 and (rule == "symmetric" or rule.startswith("hybrid")):
                        continue
                    if rule == "hybrid_1bit" and bits != 2:
                        continue
                    yield side, "grid", 80, 32, "bf16" if bits == 4 else "f16", str(bits), {"axis": axis, "rule": rule}
        for axis in ("tokens", "channels"):
            for params in ("f16", "f8e4m3"):
                yield side, "grid", 100, 64, params, "2", {"axis": axis, "levels": 3, "clip": 0.92}
            yield side, "grid", 64, 32, "f16", "2", {"axis": axis, "rule": "symmetric", "levels": 3}
            yield side, "grid", 128, 128, "f16", "8", {"axis": axis, "rule": "symmetric"}
            yield side, "grid", 64, 64, "f16", "2", {"axis": axis, "rule": "integer", "clip": 0.8}
        edges = {"axis": "channels", "edges": "0,1,6,7,20,32,61,64,100"}
        for rule in ("asym", "integer", "symmetric"):
            yield side, "grid", 100, 32, "f16", "4", dict(edges, rule=rule)
        yield side, "grid", 100, 32, "f16", "2", dict(edges, levels=3)
        for bits, book in BOOKS.items():
            for rule in ("codebook_norm", "codebook_range", "codebook_fixed"):
                more = {"axis": "channels", "rule": rule, "book": book}
                yield side, "codebook", 96, 32 if bits == 2 else 96, "f16", str(bits), more
                if rule != "codebook_norm":
                    yield side, "codebook", 80, 80, "bf16", str(bits), dict(more, outliers=3)
        more = {"axis": "channels", "rule": "codebook_range", "book": BOOKS[3], "outliers": 22}
        yield side, "codebook", 20, 24, "f16", "3", more  # more slots than channels
    yield "key", "tiered", 100, 40, "f16", "16x3,3x20,1x40,0x37", {"rule": "midpoint"}
    yield "key", "tiered", 300, 128, "f16", "4x50,2x250", {"map": 0}
    for dim, ladder in ((64, "8x8,2x24,3x16,1x16"), (128, "8x8,4x12,6x4,2x60,3x20,1x20,0x4"), (80, "4x10,6x6,2x40,0x24"),
                        (100, "8x3,4x9,6x5,2x4,3x7,1x3,0x69"), (300, "6x50,3x100,1x100,0x50"), (96, "0x96"), (96, "4x96")):
        yield "key", "tiered", dim, 128, "f16", ladder, {"rule": "searched"}
    yield "key", "tiered", 64, 128, "f16", "2x64", {"rule": "searched", "shrinks": 1}
    for dim, bits, wide in ((64, 3, 0), (64, 2, 32), (80, 1, 40), (100, 4, 48), (128, 5, 64), (128, 5, 0), (96, 3, 48),
                            (20, 6, 0)):
        more = {"axis": "channels", "rule": "fitted", "wide": wide} if wide else {"axis": "channels", "rule": "fitted"}
        yield "value", "grid", dim, 128, "f16", str(bits), more


def as_page(side, store, dim, group, params, widths, more):
    page = {"side": side, "store": store, "dim": dim, "group": group, "params": params, **more}
    if store == "tiered":
        page["ladder"] = [[int(n) for n in tier.split("x")] for tier in widths.split(",")]
    else:
        page["bits"] = int(widths)
    if "book" in more:
        page["book"] = [float(level) for level in more["book"].split(",")]
    if "edges" in more:
        page["edges"] = [int(edge) for edge in more["edges"].split(",")]
    return page


def main():
    print("# side store head_size group params bits_or_ladder bytes crc32 key=value...; written by make_pages.py")
    for case in [(*case, {}) for case in cases()] + list(rule_cases()):
        page = as_page(*case)
        data = encode(page, rows_of(page["dim"]))
        more = [f"{key}={value}" for key, value in case[6].items()]
        print(*case[:6], len(data), "%08x" % zlib.crc32(data), *more)


if __name__ == "__main__":
    main()
