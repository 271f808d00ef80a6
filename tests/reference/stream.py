"""One layer's KV heads over a sequence whose rows come one at a time: what is packed, with which plan, as which codes,
and what it decodes to."""

import hashlib

import numpy as np

import grids
import planes
from calibrated import KvQuant, KvTuner, RotateKv, Skvq
from mosaic import Mosaic
from methods import PAGE, InnerQ, Kitty, Kivi, MixKvq, PnMix, Q4, Q8, Raw, TurboQuant, unit_norms
from narrow import F32, enter, enter_query, f16_bits, f16_values

METHODS = {"f16": Raw, "bf16": Raw, "f32": Raw, "kivi": Kivi, "mixkvq": MixKvq, "kitty": Kitty, "pnmix": PnMix,
           "innerq": InnerQ, "kvtuner": KvTuner, "kvquant": KvQuant, "rotatekv": RotateKv, "skvq": Skvq,
           "turboquant": TurboQuant, "q8_0": Q8, "q4_0": Q4, "mosaic": Mosaic}
SIDES = ("key", "value")


def open_method(spec, shape, calibration=None):
    return METHODS[spec.partition(":")[0]](spec, shape, calibration)


class Page:
    """What a page holds. Channels are those of the stored basis (behind the transform).

    codes    [rows][D]; of 16-bit channels the f16 bits
    scale    stored bits: groups of tokens [groups][D], groups of channels [rows][groups]; None if the rule has none
    offset   likewise
    ladder   [(bits, channels)], tiered stores; map: the channel at each ladder position, where the page holds it
    outliers (channels [rows][n], f16 bits [rows][n]) or None
    units    f16 bits that logarithms (in `scale`) and offsets of pages in planes are under, or None
    decoded  [rows][D] in the stored basis
    """

    def __init__(self, first, rows, dim):
        self.first, self.rows = first, rows
        self.codes = np.zeros((rows, dim), np.uint16)
        self.decoded = np.zeros((rows, dim), F32)
        self.scale = self.offset = self.ladder = self.map = self.outliers = self.units = None


def metadata_type(rule):
    return np.uint8 if rule.params == "f8e4m3" else np.uint16


def narrower(rule, bits):
    """The rule of one tier of a ladder."""
    return grids.Rule(rule.name, bits, rule.params, rule.levels, rule.clip)


def encode_token_groups(page, plan, rows, ladder):
    """A scale for each channel and `group` tokens."""
    dim, group = rows.shape[1], plan.group
    count = -(-len(rows) // group)
    kind = metadata_type(plan.rule)
    page.scale = np.zeros((count, dim), kind)
    page.offset = np.zeros((count, dim), kind) if plan.rule.has_offsets else None
    for bits, channels in ladder:
        if bits == 16:
            page.codes[:, channels] = f16_bits(rows[:, channels])
            page.decoded[:, channels] = f16_values(page.codes[:, channels])
            continue
        rule = narrower(plan.rule, bits)
        for g in range(count):
            at = slice(g * group, (g + 1) * group)
            groups = grids.encode(rows[at][:, channels], rule)
            page.codes[at, channels] = groups.codes
            page.scale[g, channels] = groups.scale
            if page.offset is not None:
                page.offset[g, channels] = groups.offset
            page.decoded[at, channels] = grids.decode(groups, rule)


def encode_channel_groups(page, plan, rows):
    """Scales for each token."""
    rule, kind, edges = plan.rule, metadata_type(plan.rule), plan.edges
    groups = len(edges) - 1
    if rule.has_scales:
        page.scale = np.zeros((len(rows), groups), kind)
    if rule.has_offsets:
        page.offset = np.zeros((len(rows), groups), kind)
    columns, apart = rows.T, None
    if rule.outliers:
        pick = grids.range_outliers if rule.name == "codebook_range" else grids.fixed_outliers
        apart = pick(columns, rule.outliers)
        page.outliers = grids.outlier_slots(columns, apart, rule.outliers)
    elif rule.name == "codebook_range":
        apart = np.zeros(columns.shape, bool)
    for g, (a, b) in enumerate(zip(edges, edges[1:])):
        found = grids.encode(columns[a:b], rule, None if apart is None else apart[a:b])
        page.codes[:, a:b] = found.codes.T
        if page.scale is not None:
            page.scale[:, g] = found.scale
        if page.offset is not None:
            page.offset[:, g] = found.offset
        page.decoded[:, a:b] = grids.decode(found, rule).T
    if rule.outliers:
        page.decoded = grids.put_outliers(page.decoded.T, *page.outliers).T


def encode_planes(page, plan, rows, ladder):
    """Logarithms of channels (keys) or tokens (values), an offset for each channel."""
    if plan.rule.name == "searched":
        bits = np.zeros(rows.shape[1], np.int64)
        for width, channels in ladder:
            bits[channels] = width
        found = planes.Searched(rows, bits, plan.shrinks)
        page.scale, page.units = found.log[None], np.asarray([found.unit], np.uint16)
    else:
        found = planes.Fitted(rows, plan.rule.bits, plan.wide)
        page.scale, page.units = found.log[:, None], found.units
    page.codes, page.offset, page.decoded = found.codes, found.offset[None], found.decoded


class Seals:
    """When rows of a side are packed: rows come one at a time."""

    def __init__(self, window, total):
        self.packed, self.trigger, self.freeze_at = 0, [], None  # trigger[b]: rows there are when block b is packed
        for rows in range(1, total + 1):
            after = window.packed_after(self.packed, rows - window.front)
            if window.flush:
                self.trigger += [rows] * ((after - self.packed) // window.flush)
            self.packed = after
        if total >= window.front + PAGE:
            self.freeze_at = window.front + PAGE


class Stream:
    """Rows q [T][H][D], k [T][G][D], v [T][G][D] as they came, of one layer, and what a cache makes of them."""

    def __init__(self, method, q, k, v, positions, first_step=0):
        self.method, self.shape, self.positions = method, method.shape, positions
        self.total, self.first_step = len(k), first_step
        self.plans, self.rows, self.seals, self.pages, self.decoded = {}, {}, {}, {}, {}
        for side, rows in zip(SIDES, (k, v)):
            for head in range(self.shape.kv_heads):
                plan = method.side(side, head)
                self.plans[side, head] = plan
                self.rows[side, head] = enter(rows[:, head], plan.raw)
            self.seals[side] = Seals(self.plans[side, 0].window, self.total)
        self.q = enter_query(q, self.plans["key", 0].raw)
        for side in SIDES:
            self.pack(side)

    def query(self, head, begin, end):
        """Sum of |q| (or of pair norms, or squares) of rows [begin, end), and how many q vectors went in."""
        shared = self.shape.heads // self.shape.kv_heads
        units = self.shape.pairs()
        total = np.zeros(self.shape.dims["key"], F32)
        for t in range(begin, end):
            for h in range(head * shared, (head + 1) * shared):
                one = self.q[t, h]
                if self.method.query_sum == "pair_norm":
                    norms = unit_norms(one, units)
                    one = np.zeros(len(total), F32)
                    for unit, norm in zip(units, norms):
                        one[list(unit)] = norm
                total = total + (one * one if self.method.query_sum == "square" else np.abs(one))
        return total, (end - begin) * shared

    def pack(self, side):
        heads, method, seals = range(self.shape.kv_heads), self.method, self.seals[side]
        window = self.plans[side, 0].window
        if method.freezes(side) and seals.freeze_at and window.flush:
            for head in heads:
                seen = self.query(head, 0, seals.freeze_at) if side == "key" and method.uses_query else (None, 0)
                rows, plan = self.rows[side, head][: seals.freeze_at], self.plans[side, head]
                if plan.centred and self.shape.rope is not None:
                    rows = self.shape.rope.turn(rows, self.positions[: seals.freeze_at], back=True)
                method.freeze(plan, side, rows, window.front, *seen)
        for head in heads:
            self.pages[side, head] = []
            self.decoded[side, head] = self.rows[side, head].copy()
        for first in range(0, seals.packed, PAGE):
            at = slice(window.front + first, window.front + min(first + PAGE, seals.packed))
            stored = self.forward(side, at)
            found = [self.encode(side, head, first, stored[head]) for head in heads]
            back = self.inverse(side, at, [page.decoded for page in found])
            for head in heads:
                self.pages[side, head].append(found[head])
                raw = [i for i in self.plans[side, head].pinned if first == 0 and i < found[head].rows]
                back[head][raw] = self.rows[side, head][at][raw]
                self.decoded[side, head][at] = back[head]

    def forward(self, side, at):
        """Rows of a page of each head in the stored basis."""
        rows = [self.rows[side, head][at] for head in range(self.shape.kv_heads)]
        if self.plans[side, 0].pre_rope:
            rows = [self.shape.rope.turn(one, self.positions[at], back=True) for one in rows]
        if self.plans[side, 0].centred:
            rows = [one - self.centre(side, head, at) for head, one in enumerate(rows)]
        if self.plans[side, 0].transform.joined == 1:
            return [self.plans[side, head].transform.forward(one) for head, one in enumerate(rows)]
        joined = self.plans[side, 0].transform.forward(np.concatenate(rows, axis=1))
        return np.split(joined, self.shape.kv_heads, axis=1)

    def inverse(self, side, at, rows):
        if self.plans[side, 0].transform.joined == 1:
            rows = [self.plans[side, head].transform.inverse(one) for head, one in enumerate(rows)]
        else:
            joined = self.plans[side, 0].transform.inverse(np.concatenate(rows, axis=1))
            rows = np.split(joined, self.shape.kv_heads, axis=1)
        if self.plans[side, 0].pre_rope:
            rows = [self.shape.rope.turn(one, self.positions[at], back=False) for one in rows]
        if self.plans[side, 0].centred:
            rows = [one + self.centre(side, head, at) for head, one in enumerate(rows)]
        return [np.array(one) for one in rows]

    def centre(self, side, head, at):
        """R_t m of the rows of a page."""
        mean = self.plans[side, head].mean
        return mean if self.shape.rope is None else self.shape.rope.turn_mean(mean, self.positions[at])

    def encode(self, side, head, first, rows):
        plan = self.plans[side, head]
        page = Page(first, len(rows), rows.shape[1])
        if plan.axis == "channels":
            encode_channel_groups(page, plan, rows)
            return page
        ladder = [(plan.rule.bits, np.arange(rows.shape[1]))]
        if plan.tiered:
            ladder = plan.ladder if plan.ladder else self.plan_block(side, head, first, rows)
            page.ladder = [(bits, len(channels)) for bits, channels in ladder]
            if plan.page_map:
                page.map = np.concatenate([channels for _, channels in ladder])
        (encode_planes if plan.rule.name in ("searched", "fitted") else encode_token_groups)(page, plan, rows, ladder)
        return page

    def plan_block(self, side, head, first, rows):
        """Ladder of the block that begins at row `first` beyond the front; a block is a page in tiered stores."""
        window, method = self.plans[side, head].window, self.method
        trigger = self.seals[side].trigger
        block = first // window.flush
        begin, last, seen_rows = block, block, trigger[block]
        together = sum(rows <= self.first_step for rows in trigger) if method.o.values.get("map") == "prompt" else 0
        if block < together:  # all blocks that the first step packs, and all its queries
            begin, last, seen_rows = 0, together - 1, self.first_step
            rows = self.rows[side, head][window.front + begin * PAGE : window.front + (last + 1) * PAGE]
        since = 0
        if method.o.values.get("query") == "window" and begin > 0:
            since = trigger[begin - 1]
        seen = self.query(head, since, seen_rows) if method.uses_query else (None, 0)
        return method.plan(rows, *seen)

    def sections(self):
        """(name, array) of everything that must be equal bit for bit, in a fixed order."""
        for (side, head), plan in self.plans.items():
            packed = self.seals[side].packed
            yield f"{side} {head} packed", np.asarray([plan.window.front, packed], np.int64)
            if plan.rule is None:
                yield f"{side} {head} decoded", self.decoded[side, head]
            if not packed:
                continue
            for name in ("shift", "scale", "order"):
                value = getattr(plan.transform, name)
                if value is not None:
                    yield f"{side} {head} {name}", value.astype(np.int64) if name == "order" else value
            if plan.mean is not None:
                yield f"{side} {head} mean", plan.mean
            yield f"{side} {head} pinned", np.asarray(plan.pinned, np.int64)
            for n, page in enumerate(self.pages[side, head]):
                where = f"{side} {head} page {n}"
                if page.ladder is not None:
                    yield f"{where} ladder", np.asarray(page.ladder, np.int64).reshape(-1, 2)
                if page.map is not None:
                    yield f"{where} map", np.asarray(page.map, np.int64)
                yield f"{where} codes", page.codes
                for name in ("scale", "offset"):
                    if getattr(page, name) is not None:
                        yield f"{where} {name}", getattr(page, name).astype(np.uint16)
                if page.units is not None:
                    yield f"{where} units", page.units
                if page.outliers is not None:
                    yield f"{where} outlier channels", page.outliers[0]
                    yield f"{where} outlier values", page.outliers[1]

    def digest(self):
        """SHA-256 over all sections."""
        total = hashlib.sha256()
        for name, array in self.sections():
            total.update(f"{name} {array.dtype} {array.shape}\n".encode())
            total.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
        return total.hexdigest()

    def sum(self):
        """Of all decoded values, in double."""
        return float(sum(self.decoded[key].astype(np.float64).sum() for key in sorted(self.decoded)))
