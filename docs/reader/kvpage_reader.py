#!/usr/bin/env python3
"""Reads kvmosaic pages from a dump, by docs/format.md alone.

A dump is one or more pages, each a line of JSON that says what the page is, followed by the page's bytes:

    {"kvmosaic_page": 1, "side": "key", "store": "grid", "dim": 64, "bits": 2, "group": 32, "params": "f16",
     "bytes": 3072}

    side    "key" or "value"
    store   "raw" (needs "raw": "f32" | "f16" | "bf16", and "tokens"), "grid" (needs "bits") or
            "tiered" (needs "ladder": [[bits, channels], ...], widest first)
    group   tokens (key side) or channels (value side) that share a scale
    params  type of scales and offsets: "f16", "bf16" or "f8e4m3"

Plain Python, no other package. It shares no code with the library, so that the two can judge each other.

    kvpage_reader.py DUMP              prints every page as rows of decoded values
    kvpage_reader.py DUMP --layout     prints where the parts of every page lie
    kvpage_reader.py DUMP --f32 OUT    writes the decoded rows of all pages as little-endian fp32
"""

import argparse
import json
import struct
import sys

PAGE_TOKENS = 128
ALIGN = 32
# Depth of a chunk, and its planes from the first byte on: (bits of the plane, position of its lowest bit in the code).
CHUNKS = {
    1: (32, [(1, 0)]),
    2: (16, [(2, 0)]),
    3: (32, [(2, 0), (1, 2)]),
    4: (8, [(4, 0)]),
    6: (16, [(4, 0), (2, 4)]),
    8: (8, [(4, 0), (4, 4)]),
}
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1}


def round_up(n, to):
    return (n + to - 1) // to * to


def f32(x):
    """The nearest fp32 to a Python float."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def read_float(kind, data, offset, index):
    at = offset + index * SIZES[kind]
    if kind == "f32":
        return struct.unpack_from("<f", data, at)[0]
    if kind == "f16":
        return struct.unpack_from("<e", data, at)[0]
    if kind == "bf16":
        return struct.unpack("<f", b"\0\0" + data[at : at + 2])[0]
    byte = data[at]
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if byte & 0x80 else value


class Layout:
    """Offsets of a page, worked out from its description."""

    def __init__(self, page):
        self.key = page["side"] == "key"
        self.store, self.dim = page["store"], page["dim"]
        self.tokens = page.get("tokens", PAGE_TOKENS)
        self.lanes, self.depth = (self.tokens, self.dim) if self.key else (self.dim, self.tokens)
        if self.store == "raw":
            self.raw = page["raw"]
            self.bytes = round_up(self.tokens * self.dim * SIZES[self.raw], ALIGN)
            return
        self.group, self.params = page["group"], page["params"]
        self.groups = -(-self.lanes // self.group)
        ladder = page["ladder"] if self.store == "tiered" else [[page["bits"], self.depth]]
        self.tiers = []  # (bits, live, padded, first ladder position, first column, offset in a lane block)
        self.raw_depth = self.zero_bits = self.columns = self.block_bytes = 0
        position = 0
        for bits, live in ladder:
            if bits == 16:
                self.raw_depth = live
            elif bits == 0:
                self.zero_bits = live
            else:
                padded = round_up(live, CHUNKS[bits][0])
                self.tiers.append((bits, live, padded, position, self.columns, self.block_bytes))
                self.columns += padded
                self.block_bytes += padded * bits
            position += live
        self.columns += self.zero_bits
        self.blocks = -(-self.lanes // 8)
        self.raw_offset = self.blocks * self.block_bytes
        self.scale_offset = self.raw_offset + self.raw_depth * self.lanes * 2
        self.zero_offset = self.scale_offset + self.groups * self.columns * SIZES[self.params]
        self.map_offset = self.zero_offset + self.groups * self.columns * SIZES[self.params]
        self.map_element = (2 if self.dim > 256 else 1) if self.store == "tiered" else 0
        if self.map_element:
            self.map_offset = round_up(self.map_offset, self.map_element)
        self.bytes = round_up(self.map_offset + self.dim * self.map_element, ALIGN)

    def sites(self, tier, lane, position):
        """(byte, shift, width, weight) of each plane of a code."""
        bits, _, _, _, _, offset = tier
        chunk, planes = CHUNKS[bits]
        at = lane // 8 * self.block_bytes + offset + position // chunk * chunk * bits
        inside, found = position % chunk, []
        for width, weight in planes:
            in_vector = 32 // width  # depth that one 32-byte vector holds
            vector, d = divmod(inside, in_vector)
            found.append((at + 32 * vector + 4 * (lane % 8) + d % 4, width * (d // 4), width, weight))
            at += chunk // in_vector * 32
        return found

    def describe(self):
        if self.store == "raw":
            return [f"0 .. {self.tokens * self.dim * SIZES[self.raw]}: rows [{self.tokens}][{self.dim}] {self.raw}"]
        lines = [f"0 .. {self.raw_offset}: codes, {self.blocks} lane blocks of {self.block_bytes} bytes"]
        for bits, live, padded, first, column, offset in self.tiers:
            where = f"ladder positions from {first}, columns from {column}"
            lines.append(f"    +{offset}: {live} (padded to {padded}) of {bits} bits, {where}")
        shape = f"[{self.groups}][{self.columns}] {self.params}"
        if self.raw_depth:
            lines.append(f"{self.raw_offset} .. {self.scale_offset}: raw channels [{self.raw_depth}][{self.lanes}] f16")
        lines.append(f"{self.scale_offset}: scales {shape}")
        lines.append(f"{self.zero_offset}: offsets {shape}")
        if self.map_element:
            lines.append(f"{self.map_offset}: map [{self.dim}] u{8 * self.map_element}")
        return lines + [f"{self.bytes}: end"]


def decode(page, data):
    """Rows of a page: [tokens][dim] floats, each exactly the fp32 that the library decodes."""
    layout = Layout(page)
    if len(data) != layout.bytes:
        raise ValueError(f"page has {len(data)} bytes, its description needs {layout.bytes}")
    rows = [[0.0] * layout.dim for _ in range(layout.tokens)]
    if layout.store == "raw":
        for i in range(layout.tokens * layout.dim):
            rows[i // layout.dim][i % layout.dim] = read_float(layout.raw, data, 0, i)
        return rows
    channels = list(range(layout.depth))
    if layout.map_element:
        kind = "<%d%s" % (layout.dim, "B" if layout.map_element == 1 else "H")
        channels = list(struct.unpack_from(kind, data, layout.map_offset))
        if sorted(channels) != list(range(layout.dim)):
            raise ValueError("the channel map is no permutation")

    def put(lane, ladder_position, value):
        if layout.key:
            rows[lane][channels[ladder_position]] = value
        else:
            rows[ladder_position][lane] = value

    def param(offset, group, column):
        return read_float(layout.params, data, offset, group * layout.columns + column)

    for position in range(layout.raw_depth):
        for lane in range(layout.lanes):
            put(lane, position, read_float("f16", data, layout.raw_offset, position * layout.lanes + lane))
    for tier in layout.tiers:
        _, live, _, first, column, _ = tier
        for position in range(live):
            planes = layout.sites(tier, 0, position)  # of lane 0; the others lie a fixed way from it
            for lane in range(layout.lanes):
                if lane % layout.group == 0:
                    scale = param(layout.scale_offset, lane // layout.group, column + position)
                    zero = param(layout.zero_offset, lane // layout.group, column + position)
                code, away = 0, lane // 8 * layout.block_bytes + 4 * (lane % 8)
                for byte, shift, width, weight in planes:
                    code |= (data[byte + away] >> shift & (1 << width) - 1) << weight
                put(lane, first + position, f32(zero + f32(scale * code)))
    for i in range(layout.zero_bits):
        for lane in range(layout.lanes):
            value = param(layout.zero_offset, lane // layout.group, layout.columns - layout.zero_bits + i)
            put(lane, layout.dim - layout.zero_bits + i, value)
    return rows


def pages(path):
    """(description, bytes) of each page in a dump."""
    with open(path, "rb") as file:
        while True:
            line = file.readline()
            if not line:
                return
            page = json.loads(line)
            if page.get("kvmosaic_page") != 1:
                raise ValueError(f"{path}: not a page dump of version 1")
            data = file.read(page["bytes"])
            if len(data) != page["bytes"]:
                raise ValueError(f"{path}: cut short, {len(data)} of {page['bytes']} bytes of a page")
            yield page, data


def main():
    parser = argparse.ArgumentParser(description="Reads kvmosaic pages from a dump (docs/format.md).")
    parser.add_argument("dump")
    parser.add_argument("--layout", action="store_true", help="print where the parts of each page lie")
    parser.add_argument("--f32", metavar="OUT", help="write the decoded rows as little-endian fp32")
    args = parser.parse_args()
    out = open(args.f32, "wb") if args.f32 else None
    for page, data in pages(args.dump):
        if args.layout:
            print(json.dumps(page), *Layout(page).describe(), sep="\n")
            continue
        for row in decode(page, data):
            if out:
                out.write(struct.pack("<%df" % len(row), *row))
            else:
                print(*("%.6g" % x for x in row))
    if out:
        out.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"kvpage_reader: {error}")
