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
    wide    rule "fitted": the first channels, which have one bit more than "bits"; without it none

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
    "searched": (True, True),
    "fitted": (True, True),
}
# Pages in planes: the side and kind of store of each such rule, planes in their order with the position of their lowest
# bit in the codes of each width that has them, the order of a ladder's widths, and the steps of values by width.
IN_PLANES = {"searched": ("key", "tiered"), "fitted": ("value", "grid")}
PLANES = [
    (4, {8: 0, 6: 0, 5: 0, 4: 0}),
    (4, {8: 4}),
    (2, {6: 4, 3: 0, 2: 0}),
    (1, {5: 4, 3: 2, 1: 0}),
]
PLANE_LADDER = [8, 4, 6, 2, 3, 1, 0]
STEPS = [0.0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041]
KEYS = set(
    "kvmosaic_page side store dim tokens raw bits ladder group edges axis params rule levels wide book outliers map bytes"
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
        self.planes = []  # (width, {bits: weight}, offset, first lane block, lane blocks, first depth, padded depth)
        if self.rule in IN_PLANES:
            self.lay_planes(page)
            return
        if "wide" in page:
            raise ValueError(f"a {self.rule} page has no wide channels")
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

    def lay_planes(self, page):
        if IN_PLANES[self.rule] != (page["side"], self.store) or self.levels or "edges" in page:
            raise ValueError(f"no {self.rule} page is like this")
        self.map_element = 0
        self.blocks = -(-self.lanes // 8)
        if self.key:
            widths = [bits for bits, _ in page["ladder"]]
            if widths != [bits for bits in PLANE_LADDER if bits in widths]:
                raise ValueError("the ladder's widths are not in the order of pages in planes")
            self.bits = [bits for bits, live in page["ladder"] for _ in range(live)]
        else:
            wide = page.get("wide", 0)
            if wide % 8 or not 0 <= wide < self.dim:
                raise ValueError(f"{wide} wide channels")
            self.bits = [page["bits"] + (channel < wide) for channel in range(self.dim)]
            if not set(self.bits) <= {1, 2, 3, 4, 5, 6}:
                raise ValueError(f"unknown width {page['bits']}")
        at = 0
        for width, weights in PLANES:
            have = [i for i, bits in enumerate(self.bits) if bits in weights]
            if not have:
                continue
            first, depth, block, blocks = 0, self.depth, 0, self.blocks
            if self.key:
                first, depth = have[0], round_up(have[-1] + 1 - have[0], 32 // width)
            else:  # channels are lanes; wide ones are whole blocks
                block, blocks = have[0] // 8, have[-1] // 8 + 1 - have[0] // 8
            self.planes.append((width, weights, at, block, blocks, first, depth))
            at += blocks * depth * width
        self.scale_offset = at
        self.zero_offset = at + (self.dim if self.key else self.tokens)
        self.unit_offset = round_up(self.zero_offset + self.dim, 2)
        self.map_offset = self.unit_offset + (2 if self.key else 4)
        if self.key and page.get("map", True):
            self.map_element = 2 if self.dim > 256 else 1
        self.bytes = round_up(self.map_offset + self.dim * self.map_element, ALIGN)

    def plane_sites(self, bits, lane, depth):
        """(byte, shift, width, weight) of each plane of a code of a page in planes."""
        found = []
        for width, weights, offset, first_block, _, first, padded in self.planes:
            if bits in weights:
                vector, d = divmod(depth - first, 32 // width)
                byte = offset + (lane // 8 - first_block) * padded * width + 32 * vector + 4 * (lane % 8) + d % 4
                found.append((byte, width * (d // 4), width, weights[bits]))
        return found

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
        if self.rule in IN_PLANES:
            lines = [f"{offset}: plane of {width} bits, lane blocks from {block} on [{blocks}] of {depth * width} bytes, "
                     f"depth from {first} on (padded to {depth})"
                     for width, _, offset, block, blocks, first, depth in self.planes]
            lines += [f"{self.scale_offset}: logarithms u8, {self.rule}", f"{self.zero_offset}: offsets i8 [{self.dim}]",
                      f"{self.unit_offset}: units f16 [{1 if self.key else 2}]"]
            if self.map_element:
                lines.append(f"{self.map_offset}: map [{self.dim}] u{8 * self.map_element}")
            return lines + [f"{self.bytes}: end"]
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


def power(sixteenths):
    """2^(-sixteenths / 16): the nearest fp32 of the fraction's power; halving is exact."""
    return f32(2.0 ** (-(sixteenths % 16) / 16)) * 0.5 ** (sixteenths // 16)


def decode_planes(layout, data, put):
    """Calls put(lane, depth, value) for every value of a page in planes."""
    unit = read_float("f16", data, layout.unit_offset, 0)
    offsets = struct.unpack_from("<%db" % layout.dim, data, layout.zero_offset)
    for p, bits in enumerate(layout.bits):
        top, offset = (1 << bits) - 1, offsets[p]
        if layout.key:
            h = f32(unit * power(2 * data[layout.scale_offset + p]))
            middle = f32(offset * f32(h / 16))
            scale, zero = (f32(f32(2 * h) / top), f32(middle - h)) if bits else (0.0, middle)
        else:
            zero, step = f32(offset * read_float("f16", data, layout.unit_offset, 1)), f32(STEPS[bits])
        for t in range(PAGE_TOKENS):
            lane, depth = (t, p) if layout.key else (p, t)
            code = 0
            for byte, shift, width, weight in layout.plane_sites(bits, lane, depth):
                code |= (data[byte] >> shift & (1 << width) - 1) << weight
            level = code
            if not layout.key:
                scale = f32(unit * power(data[layout.scale_offset + t]))
                level = f32((code - top / 2) * step)
            put(lane, depth, f32(zero + f32(scale * level)))


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

    if layout.rule in IN_PLANES:
        decode_planes(layout, data, put)
        return rows

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
