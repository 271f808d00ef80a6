#!/usr/bin/env python3
"""Writes tests/golden/pages.txt: sizes and CRC-32 of pages that every encoder must make.

An encoder of its own, by docs/numerics.md and the offsets of docs/reader/kvpage_reader.py; it runs no code of the
library. Run it again only when the format changes on purpose, and say so in the changelog:

    python3 tests/golden/make_pages.py > tests/golden/pages.txt
"""

import os
import struct
import sys
import zlib

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "reader"))
from kvpage_reader import PAGE_TOKENS, SIZES, Layout, f32, read_float  # noqa: E402

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


def grid(kind, bits, values):
    """(scale, offset) as stored."""
    low, high = min(values), max(values)
    low, high = low + 0.0, high + 0.0
    scale = rounded(kind, f32(f32(high - low) / ((1 << bits) - 1))) if bits else 0.0
    if scale == 0.0:
        return 0.0, rounded(kind, low if low == high else f32(0.5 * low + 0.5 * high))
    return scale, rounded(kind, low)


def encode(page, rows):
    layout, dim = Layout(page), page["dim"]
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
    spans = [(t, p, t[3] + p, t[4] + p) for t in layout.tiers for p in range(t[1])]
    first_zero = layout.columns - layout.zero_bits
    spans += [(None, i, dim - layout.zero_bits + i, first_zero + i) for i in range(layout.zero_bits)]
    for tier, in_tier, position, column in spans:
        for group in range(layout.groups):
            lanes = range(group * layout.group, min((group + 1) * layout.group, layout.lanes))
            bits = tier[0] if tier else 0
            scale, offset = grid(layout.params, bits, [value(lane, position) for lane in lanes])
            put_float(layout.params, layout.scale_offset, group * layout.columns + column, scale)
            put_float(layout.params, layout.zero_offset, group * layout.columns + column, offset)
            if scale == 0.0:
                continue
            inverse = f32(1.0 / scale)
            for lane in lanes:
                code = round_even(f32(f32(value(lane, position) - offset) * inverse))
                code = max(0, min((1 << bits) - 1, code))
                for byte, shift, width, weight in layout.sites(tier, lane, in_tier):
                    data[byte] |= (code >> weight & (1 << width) - 1) << shift
    for position in range(dim if layout.map_element else 0):
        at = layout.map_offset + position * layout.map_element
        data[at : at + layout.map_element] = channel_at(position, dim).to_bytes(layout.map_element, "little")
    return bytes(data)


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


def main():
    print("# side store head_size group params bits_or_ladder bytes crc32; written by make_pages.py")
    for side, store, dim, group, params, widths in cases():
        page = {"side": side, "store": store, "dim": dim, "group": group, "params": params}
        if store == "grid":
            page["bits"] = int(widths)
        else:
            page["ladder"] = [[int(n) for n in tier.split("x")] for tier in widths.split(",")]
        data = encode(page, rows_of(dim))
        print(side, store, dim, group, params, widths, len(data), "%08x" % zlib.crc32(data))


if __name__ == "__main__":
    main()
