"""Numeric traps that released code of these methods fell into, and worked vectors of single groups, against the library
itself: what is expected is written down here, not computed by the reference."""

import inspect

import numpy as np

import cases
import dump
from calibrated import Calibration
from methods import Shape
from narrow import F32, f16_values

VECTOR = [-1, -0.2, 0.4, 3]


class Rows(cases.Case):
    """A case with rows that are given. k [T][D] or [T][G][D]; v likewise; q is zeros unless given."""

    def __init__(self, spec, k=None, v=None, q=None, calibration=None, rope=None, layers=1, layer=0):
        k = np.zeros((len(v), 8), F32) if k is None else np.asarray(k, F32)
        v = np.zeros((len(k), 8), F32) if v is None else np.asarray(v, F32)
        k, v = (x[:, None] if x.ndim == 2 else x for x in (k, v))
        q = np.zeros(k.shape, F32) if q is None else np.asarray(q, F32)
        self.spec, self.total, self.steps, self.rope = spec, len(k), (0,), rope
        self.shape = Shape(q.shape[1], k.shape[1], k.shape[2], v.shape[2], rope, layer, layers)
        self.made = q, k, v, np.arange(len(k), dtype=np.int32), calibration


class Trap(Exception):
    pass


def need(true, what):
    if not true:
        raise Trap(what)


def need_equal(have, want, what):
    have, want = np.asarray(have), np.asarray(want)
    need(have.shape == want.shape and np.array_equal(have, want), f"{what}: {have.tolist()}, should be {want.tolist()}")


def need_close(have, want, what, tolerance=1e-3):
    close = np.allclose(have, want, rtol=tolerance, atol=tolerance)
    need(close, f"{what}: {np.asarray(have).tolist()}, should be {want}")


def vector_rows(values, count=1):
    """`count` rows of a group of eight: the vector twice. Same ends, same codes, twice the error."""
    return np.tile(np.asarray(values * 2, F32), (count, 1))


class Traps:
    def __init__(self, program):
        self.program = program

    def library(self, *args, **kw):
        """Sections of the library after the last row."""
        case = Rows(*args, **kw)
        return dump.run(self.program, case, case.made)[0][1]

    def group(self, spec, side, values, front=0):
        """(codes, decoded) of the first four of a group along the channels of one packed row."""
        rows = vector_rows(values, 300)
        found = self.library(spec, **{"k" if side == "key" else "v": rows})
        return found[f"{side} 0 page 0 codes"][0, :4], found[f"{side} 0 decoded"][front, :4], found

    # ---- worked vectors ----

    def check_vector_asym(self):
        for bits, codes, decoded in ((3, [0, 1, 2, 7], [-1, -0.428571, 0.142857, 3]),
                                     (2, [0, 1, 1, 3], [-1, 0.333333, 0.333333, 3]),
                                     (1, [0, 0, 0, 1], [-1, -1, -1, 3])):
            have, values, _ = self.group(f"kivi:bits={bits},group=8", "value", VECTOR)
            need_equal(have, codes, f"{bits} bit codes")
            need_close(values, decoded, f"{bits} bit values")

    def check_vector_midpoint(self):
        tokens = np.tile(np.asarray(VECTOR * 2, F32)[:, None], (16, 8))  # the group runs along the tokens
        found = self.library("pnmix:r=0,group=8,front=0", k=tokens)
        need_equal(found["key 0 page 0 ladder"], [[1, 8]], "ladder")
        need_equal(found["key 0 page 0 codes"][:4, 5], [0, 0, 0, 1], "codes")
        need_close(found["key 0 decoded"][:4, 5], [0, 0, 0, 2], "values")

    def check_vector_symmetric(self):
        codes, values, _ = self.group("innerq:norm=off,group=8,front=0,keep=0", "key", VECTOR)
        need_equal(codes.astype(int) - 3, [-1, 0, 0, 3], "3 bit codes")
        need_close(values, [-1, 0, 0, 3], "3 bit values")

    def check_vector_hybrid(self):
        for variant, asym in (("small", "1bit"), ("hybrid", "1bit")):
            tokens = np.tile(np.asarray(VECTOR * 4, F32)[:, None], (20, 8))
            found = self.library(f"innerq:variant={variant},asym={asym},front=0,keep=0", v=tokens)
            need_equal(found["value 0 page 0 codes"][:4, 2].astype(int) - 1, [0, 0, 0, 1], f"{variant}: ternary codes")
            need_close(found["value 0 decoded"][:4, 2], [0, 0, 0, 3], f"{variant}: ternary values")
            symmetric = found["value 0 page 0 scale"] & 0x8000 == 0
            need(symmetric.all(), f"{variant}: the symmetric grid loses, with an error of 1.6 to 2.2")
        shifted = np.asarray([x + 10 for x in VECTOR] * 4, F32)  # far from zero: two levels {min, max} win
        found = self.library("innerq:variant=hybrid,front=0,keep=0", v=np.tile(shifted[:, None], (20, 8)))
        need_equal(found["value 0 page 0 codes"][:4, 2], [0, 0, 0, 1], "1 bit codes")
        need_close(found["value 0 decoded"][:4, 2], [9, 9, 9, 13], "1 bit values")
        need((found["value 0 page 0 scale"] & 0x8000 != 0).all(), "the flag of the asymmetric grid is missing")

    # ---- trap 1: constant groups ----

    def check_constant_groups(self):
        specs = ["kivi", "kivi:bits=4,params=bf16", "mixkvq", "kitty", "pnmix", "innerq", "innerq:variant=hybrid",
                 "innerq:variant=hybrid,asym=4level", "q8_0", "q4_0", "turboquant:skip=0", "q4_0:hadamard=1"]
        for spec in specs:
            for value in (0.0, 1.5, -6.0):
                rows = np.full((400, 64), value, F32)
                found = self.library(spec, k=rows, v=rows)
                for side in ("key", "value"):
                    need(found[f"{side} 0 packed"][0, 1] > 0, f"{spec}: nothing is packed")
                    decoded = found[f"{side} 0 decoded"]
                    need(np.isfinite(decoded).all(), f"{spec}: {side}s of {value} are not finite")
                    if spec.startswith("turbo") and side == "key":
                        continue  # a constant row is a single peak behind the Hadamard transform
                    need(np.abs(decoded - value).max() <= 2e-3 * abs(value),
                         f"{spec}: {side}s of {value} come back as {decoded[-1, 0]} or {decoded[150, 0]}")

    def check_constant_group_stores_zero_scale(self):
        found = self.library("kivi", k=np.full((130, 8), -0.0999), v=np.full((130, 8), 7.25))
        for side in ("key", "value"):
            need(not found[f"{side} 0 page 0 scale"].any(), f"{side} scale")
            need(not found[f"{side} 0 page 0 codes"].any(), f"{side} codes")

    # ---- trap 2: order and mode of rounding ----

    def check_half_to_even(self):
        row = np.asarray([0, 0.5, 1.5, 2.5, 3, 0.75, 2.25, 3], F32)  # scale 1 exactly
        codes = self.library("kivi:bits=2,group=8", v=np.tile(row, (200, 1)))["value 0 page 0 codes"][0]
        need_equal(codes, [0, 0, 2, 2, 3, 1, 2, 3], "kivi")
        row = np.asarray([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127], F32)
        codes = self.library("q8_0", v=np.tile(row, (20, 1)))["value 0 page 0 codes"][0].astype(int) - 127
        need_equal(codes, [127, 0, 2, 2, 0, -2, -2, -127], "q8_0")
        row = np.asarray([-8, 0.5, 1.5, 2.5, -0.5, -1.5, 7.5, 7.75], F32)  # the last two lie beyond the last level
        codes = self.library("q4_0", v=np.tile(row, (20, 1)))["value 0 page 0 codes"][0].astype(int) - 8
        need_equal(codes, [-8, 0, 2, 2, 0, -2, 7, 7], "q4_0")
        tokens = np.tile(np.asarray([0, 0.5, 1.5, 2.5, 3, 0.75, 2.25, 3], F32)[:, None], (40, 8))
        codes = self.library("kitty:front=0,ratio=0,group=8", k=tokens)["key 0 page 0 codes"][:8, 0]
        need_equal(codes, [0, 0, 2, 2, 3, 1, 2, 3], "kitty")

    # ---- trap 3: codes from the stored scale ----

    def check_codes_from_stored_scale(self):
        """8-bit scales are off by up to 6 %: codes of the exact scale would miss by more than half a step."""
        row = np.asarray([0, 16.9, 5, 9.3, 12.7, 3.1, 14.2, 10.9], F32)
        found = self.library("kivi:bits=4,group=8,params=f8e4m3", v=np.tile(row, (200, 1)))
        codes, decoded = found["value 0 page 0 codes"][0], found["value 0 decoded"][0]
        scale = F32(1.125)  # the nearest of f8e4m3 to 1.1267
        need_equal(codes, np.clip(np.rint(f16_values(np.float16(row).view(np.uint16)) / scale), 0, 15), "codes")
        need(np.abs(decoded - row)[codes < 15].max() <= scale / 2 + 1e-2, "an error above half a step")
        row = np.asarray([0, 18.1, 1.8, 3.05, 4.27, 5.5, 6.7, 17.6], F32)  # 1.2067 is stored as 1.25
        codes = self.library("kivi:bits=4,group=8,params=f8e4m3", v=np.tile(row, (200, 1)))["value 0 page 0 codes"][0]
        exact = np.rint(row / F32(18.1 / 15))
        need_equal(codes, np.rint(row / F32(1.25)), "codes")
        need(not np.array_equal(codes, exact), "this row no longer tells stored from exact scales")

    def check_saturated_outlier(self):
        """An outlier that its scale cannot reach saturates; its neighbours stay within half a step."""
        row = np.asarray([-60000, 60000, 1, -2, 3, 100, -300, 440], F32)
        found = self.library("kivi:bits=2,group=8,params=f8e4m3", v=np.tile(row, (200, 1)))
        decoded = found["value 0 decoded"][0]
        need(np.isfinite(decoded).all(), "not finite")
        need(np.abs(decoded[2:] - row[2:]).max() <= 224 + 1e-3, f"neighbours: {decoded[2:].tolist()}")
        tokens = np.tile(row[:, None], (32, 8))
        tokens[1::8] = 1e30  # beyond the raw type
        decoded = self.library("kivi:bits=8,group=8", k=tokens)["key 0 decoded"][:8, 0]
        need(np.isfinite(decoded).all() and decoded[1] >= 65000, f"beyond f16: {decoded.tolist()}")

    # ---- trap 4: what released code does against its own paper ----

    def check_rotatekv_three_bits_use_seven_steps(self):
        shape_rows = cases.Random(5).normal(200, 64)
        found = self.library("rotatekv:calib=FILE,bits=3,pins=0", k=shape_rows, v=shape_rows, rope=cases.Rope(64),
                             calibration=self.rotatekv_order(1, 64))
        codes = found["value 0 page 0 codes"]
        need(codes.max() == 7 and codes.min() == 0, f"codes reach from {codes.min()} to {codes.max()}")
        used = np.asarray([len(np.unique(codes[:, c])) for c in range(64)])
        need((used == 8).any(), "no channel uses all eight levels")
        need((codes == 7).any(axis=1).mean() > 0.5, "the top level is hardly met: steps are too large")

    def rotatekv_order(self, heads, dim):
        found = Calibration("rotatekv")
        found.add("order", 0, -1, "key", np.arange(heads * dim))
        return found

    def check_rotatekv_keeps_massive_rows(self):
        rows = cases.Random(6).normal(200, 64)
        rows[[3, 50, 127]] *= F32(40)
        rows[130] *= F32(400)  # too late: decode tokens are always packed
        found = self.library("rotatekv:calib=FILE,pins=3", k=rows, v=rows, rope=cases.Rope(64),
                             calibration=self.rotatekv_order(1, 64))
        for side in ("key", "value"):
            need_equal(found[f"{side} 0 pinned"].reshape(-1), [3, 50, 127], f"{side}: pinned rows")
            for row in (3, 50, 127):
                need_equal(found[f"{side} 0 decoded"][row], np.float16(rows[row]).astype(F32), f"{side} row {row}")

    def check_innerq_reaches_both_ends(self):
        values = np.asarray([6, -6, 1, -1, 2, 3, -3, 0], F32)
        for variant in ("base", "small"):
            tokens = np.tile(values[:, None], (40, 8))
            decoded = self.library(f"innerq:variant={variant},front=0,keep=0", v=tokens)["value 0 decoded"]
            need(decoded[0, 0] == 6 and decoded[1, 0] == -6, f"{variant}: {decoded[:2, 0].tolist()} for 6 and -6")
        decoded = self.library("innerq:norm=off,front=0,keep=0", k=np.tile(values, (200, 4)))["key 0 decoded"][0]
        need(decoded[0] == 6 and decoded[1] == -6, f"keys: {decoded[:2].tolist()} for 6 and -6")

    def check_innerq_normalizes_by_default(self):
        rows = cases.Random(7).normal(300, 32)
        rows[:, 5] *= F32(100)
        found = self.library("innerq", k=rows, v=rows)
        entered = np.abs(np.float16(rows).astype(F32))
        need_close(found["key 0 scale"].reshape(-1), np.sqrt(entered[32:160].max(axis=0)), "norms of 128 rows", 1e-6)
        off = self.library("innerq:norm=off", k=rows, v=rows)
        need("key 0 scale" not in off, "norm=off has norms")
        kept, error = np.delete(np.arange(32), 5), {}
        for name, sections in (("on", found), ("off", off)):
            error[name] = np.abs(sections["key 0 decoded"][40:150, kept] - rows[40:150, kept]).mean()
        need(error["on"] < 0.8 * error["off"], f"mean errors beside an outlier channel: {error}")

    def check_innerq_value_window_does_not_collapse(self):
        rows = cases.Random(8).normal(420, 8)
        for total in list(range(159, 163)) + [191, 192, 193, 255, 256, 420]:
            found = self.library("innerq", k=rows[:total], v=rows[:total])
            packed = int(found["value 0 packed"][0, 1])
            recent = total - 32 - packed
            need(packed % 32 == 0 and (96 <= recent < 128), f"{total} rows: {packed} packed, {recent} recent values")
            packed = int(found["key 0 packed"][0, 1])
            need(packed == (total - 32 - 96 if total >= 160 else 0), f"{total} rows: {packed} packed keys")

    def check_kvtuner_never_packs_twice(self):
        """Pages of 160 rows are those of 300 rows: history is not decoded and packed again."""
        rows = cases.Random(9).normal(300, 2, 16)
        found = Calibration("kvtuner")
        found.add("base", -1, -1, "key", [0])
        found.add("bits", 0, -1, "key", [4, 2])
        short, long = (self.library("kvtuner:calib=FILE", k=x, v=x, calibration=found) for x in (rows[:160], rows))
        for head in (0, 1):
            for side in ("key", "value"):
                for name in ("codes", "scale", "offset"):
                    where = f"{side} {head} page 0 {name}"
                    need_equal(long[where][: len(short[where])], short[where], where)

    def check_kvtuner_groups_stay_in_their_channel(self):
        """T mod 32 is not 0; a change of one key channel changes no other channel."""
        rows = cases.Random(10).normal(150, 16)
        found = Calibration("kvtuner")
        found.add("base", -1, -1, "key", [0])
        found.add("bits", 0, -1, "key", [2, 2])
        other = rows.copy()
        other[:, 6] *= F32(50)
        a, b = (self.library("kvtuner:calib=FILE", k=x, v=rows, calibration=found) for x in (rows, other))
        for name in ("codes", "scale", "offset"):
            for page in (0, 1):
                have = [x.get(f"key 0 page {page} {name}") for x in (a, b)]
                if have[0] is not None:
                    need_equal(np.delete(have[1], 6, axis=1), np.delete(have[0], 6, axis=1), f"page {page} {name}")

    # ---- trap 5: one softmax ----

    def check_softmax_spans_all_regions(self):
        """Three rows with one key: a front, a packed and a recent one share the weight, their values are averaged."""
        rows = np.zeros((400, 8), F32)
        values = np.zeros((400, 8), F32)
        rows[[0, 100, 399]] = 40.0
        values[[0, 100, 399], 0], values[100, 1] = (3, 6, 12), 9
        q = np.full((400, 1, 8), 2.0, F32)
        for spec in ("kivi:bits=8,front=2", "innerq:variant=base,norm=off,front=2", "q8_0:front=2,keep=2"):
            found = self.library(spec, k=rows, v=values, q=q)
            where = [int(x) for x in found["key 0 packed"][0]]
            need(where[0] == 2 and 101 <= where[0] + where[1] < 400, f"{spec}: rows 2 .. {sum(where)} are packed")
            have = found["attention"][0]
            need(abs(have[0] - 7) < 0.3 and abs(have[1] - 3) < 0.2, f"{spec}: {have[:2].tolist()}, should be near 7, 3")

    # ---- trap 6: bits by length ----

    def check_bits_fall_with_length(self):
        """Packed pages cost their true bits, raw rows 16; nothing is reported as if it were packed."""
        for spec, front, packed_bits in (("kivi:group=128", 0, 2.25), ("pnmix", 32, 2.25), ("kitty", 32, 2.5625 + 0.0)):
            last = 17.0
            for total in (300, 1056 + front, 2080 + front):
                rows = cases.Random(11).normal(total, 128)
                found = self.library(spec, k=rows, v=rows)
                values, packed, raw = (int(found["footprint"][0, i]) for i in (0, 2, 4))
                rows_packed = int(found["key 0 packed"][0, 1])
                pages = -(-rows_packed // 128)
                bits = 8 * (packed + raw) / values
                formula = (16 * (total - rows_packed) + packed_bits * rows_packed) / total
                need(packed * 8 >= pages * 128 * 128 * packed_bits, f"{spec}: {packed} bytes for {pages} pages")
                what = f"{spec}, {total} rows: {bits:.3f} bits, the formula says {formula:.3f}"
                need(formula - 1e-9 <= bits <= formula + 16 * 256 / total, what)
                need(bits < last, f"{spec}: bits do not fall with the length")
                last = bits


def run(program):
    """(failed, ran)"""
    if not program:
        return 0, 0
    traps, failed, ran = Traps(program), 0, 0
    for name, method in inspect.getmembers(traps, inspect.ismethod):
        if not name.startswith("check_"):
            continue
        ran += 1
        try:
            method()
        except (Trap, dump.DumpError) as error:
            failed += 1
            print(f"FAIL trap {name[6:]}: {error}", flush=True)
    return failed, ran
