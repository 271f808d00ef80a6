#!/usr/bin/env python3
"""Reads kvmosaic pages from a dump, by docs/format.md alone.

A dump is one or more pages, each a line of JSON that says what the page is, followed by the page's bytes:

    {"kvmosaic_page": 1, "side": "key", "store": "grid", "dim": 64, "bits": 2, "group": 32, "params": "f16",
     "bytes": 3072}

    side    "key" or "value"
    store   "raw" (needs "raw": "f32" | "f16" | "bf16", and "tokens"), "grid" (needs "bits"), "codebook" (needs
            "bits" and "book": [levels], may have "outliers": n) or
            "tiered" (needs "ladder": [[bits, channels], ...], widest first; "map": false if it holds no map)
    group   tokens or channels that share a scale; "edges": [0, ..., dim] instead, where groups have unequal sizes
    axis    "tokens" or "channels"; without it tokens on the key side and channels on the value side
    params  type of scales and offsets: "f16", "bf16" or "f8e4m3"
    rule    one of RULES below; without it "asym"
    levels  3: codes of three levels, five a byte

Plain Python, no other package. It shares no code with the library, so that the two can judge each other.

    kvpage_reader.py DUMP              prints every page as rows of decoded values
    kvpage_reader.py DUMP --layout     prints where the parts of every page lie
    kvpage_reader.py DUMP --f32 OUT    writes the decoded rows of all pages as little-endian fp32
"""

import argparse
import json
import math
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
# What a rule stores: scales, offsets.
RULES = {
    "asym": (True, True),
    "midpoint": (True, True),
    "integer": (True, True),
    "symmetric": (True, False),
    "extreme": (True, False),
    "hybrid_1bit": (True, True),
    "hybrid_4level": (True, True),
    "codebook_norm": (True, False),
    "codebook_range": (True, True),
    "codebook_fixed": (False, False),
}
KEYS = set(
    "kvmosaic_page side store dim tokens raw bits ladder group edges axis params rule levels book outliers map bytes"
    .split()
)
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
        self.params, self.rule, self.levels = page["params"], page.get("rule", "asym"), page.get("levels", 0)
        if self.store not in ("grid", "tiered", "codebook"):
            raise ValueError(f"unknown store {self.store}")
        if self.rule not in RULES or (self.store == "codebook") != self.rule.startswith("codebook"):
            raise ValueError(f"unknown rule {self.rule} of a {self.store} page")
        if self.levels not in (0, 3):
            raise ValueError(f"unknown levels {self.levels}")
        lane_axis, depth_axis = ("tokens", "channels") if self.key else ("channels", "tokens")
        if page.get("axis", lane_axis) not in (lane_axis, depth_axis):
            raise ValueError(f"unknown axis {page['axis']}")
        self.along_depth = page.get("axis") == depth_axis
        extent = self.depth if self.along_depth else self.lanes
        edges = page.get("edges") or [*range(0, extent, page["group"]), extent]
        if edges[0] != 0 or edges[-1] != extent or sorted(set(edges)) != edges:
            raise ValueError(f"the edges do not ascend from 0 to {extent}")
        self.group_of = [g for g in range(len(edges) - 1) for _ in range(edges[g], edges[g + 1])]
        self.groups = len(edges) - 1
        self.book = [f32(level) for level in page.get("book", ())]
        self.outliers = page.get("outliers", 0)
        ladder = page["ladder"] if self.store == "tiered" else [[page["bits"], self.depth]]
        self.tiers = []  # (bits, live, padded, first ladder position, first column, offset in a lane block)
        self.raw_depth = self.zero_bits = self.block_bytes = coded = 0
        position = 0
        for bits, live in ladder:
            if bits == 16:
                self.raw_depth = live
            elif bits == 0:
                self.zero_bits = live
            else:
                padded = round_up(live, 5 if self.levels else CHUNKS[bits][0])
                self.tiers.append((bits, live, padded, position, coded, self.block_bytes))
                coded += padded
                self.block_bytes += padded // 5 * 8 if self.levels else padded * bits
            position += live
        self.columns = self.lanes if self.along_depth else coded + self.zero_bits
        self.blocks = -(-self.lanes // 8)
        self.raw_offset = self.blocks * self.block_bytes
        self.scale_offset = self.raw_offset + self.raw_depth * self.lanes * 2
        self.has_scales, self.has_offsets = RULES[self.rule]
        array = self.groups * self.columns * SIZES[self.params]
        self.zero_offset = self.scale_offset + (array if self.has_scales else 0)
        self.outlier_offset = round_up(self.zero_offset + (array if self.has_offsets else 0), 2)
        self.map_offset = self.outlier_offset + PAGE_TOKENS * self.outliers * 4
        self.map_element = (2 if self.dim > 256 else 1) if self.store == "tiered" and page.get("map", True) else 0
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
        axis = "depth" if self.along_depth else "lanes"
        shape = f"[{self.groups}][{self.columns}] {self.params}, {self.rule}, groups along the {axis}"
        if self.raw_depth:
            lines.append(f"{self.raw_offset} .. {self.scale_offset}: raw channels [{self.raw_depth}][{self.lanes}] f16")
        if self.has_scales:
            lines.append(f"{self.scale_offset}: scales {shape}")
        if self.has_offsets:
            lines.append(f"{self.zero_offset}: offsets {shape}")
        if self.outliers:
            lines.append(f"{self.outlier_offset}: outliers [{PAGE_TOKENS}][{self.outliers}] u16 channel, f16 value")
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

    def grid(bits, group, column):
        """s and z of the decoder."""
        at = group * layout.columns + column
        scale = read_float(layout.params, data, layout.scale_offset, at) if layout.has_scales else 1.0
        zero = read_float(layout.params, data, layout.zero_offset, at) if layout.has_offsets else 0.0
        steps = 1 if layout.levels else (1 << bits >> 1) - 1
        if layout.rule == "integer" and scale != 0.0:
            zero = f32(scale * zero)
        elif layout.rule == "symmetric":
            zero = f32(-steps * scale)
        elif layout.rule == "extreme":
            zero = f32(-(1 << bits >> 1) * scale)
        elif layout.rule.startswith("hybrid"):
            flagged = math.copysign(1.0, scale) < 0
            scale = abs(scale)
            zero = zero if flagged else f32(-steps * scale)
        return scale, zero

    for position in range(layout.raw_depth):
        for lane in range(layout.lanes):
            put(lane, position, read_float("f16", data, layout.raw_offset, position * layout.lanes + lane))
    for tier in layout.tiers:
        bits, live, _, first, column, offset = tier
        grids = {}
        for position in range(live):
            planes = None if layout.levels else layout.sites(tier, 0, position)  # of lane 0; others lie a fixed way off
            for lane in range(layout.lanes):
                if layout.along_depth:
                    at = (layout.group_of[position], lane)
                else:
                    at = (layout.group_of[lane], column + position)
                if at not in grids:
                    grids[at] = grid(bits, *at)
                scale, zero = grids[at]
                code, away = 0, lane // 8 * layout.block_bytes + 4 * (lane % 8)
                if layout.levels:
                    byte = data[lane // 8 * layout.block_bytes + offset + position // 5 * 8 + lane % 8]
                    code = byte // 3 ** (position % 5) % 3
                for byte, shift, width, weight in planes or ():
                    code |= (data[byte + away] >> shift & (1 << width) - 1) << weight
                level = layout.book[code] if layout.book else code
                put(lane, first + position, f32(zero + f32(scale * level)))
    for i in range(layout.zero_bits):
        for lane in range(layout.lanes):
            value = grid(0, layout.group_of[lane], layout.columns - layout.zero_bits + i)[1]
            put(lane, layout.dim - layout.zero_bits + i, value)
    for i in range(layout.tokens * layout.outliers):
        at = layout.outlier_offset + 4 * i
        channel = data[at] | data[at + 1] << 8
        if channel != 0xFFFF:
            rows[i // layout.outliers][channel] = read_float("f16", data, at + 2, 0)
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
            if unknown := set(page) - KEYS:
                raise ValueError(f"{path}: a page says {', '.join(sorted(unknown))}, which version 1 does not know")
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
