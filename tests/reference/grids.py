"""One group: scale, offset, codes and back, by section 3 of docs/numerics.md.

Arrays are [n][groups]: the n values of a group lie along the first axis, in their order. All arithmetic is fp32 without
fused steps, which is what NumPy's elementwise operations are.
"""

import numpy as np

from narrow import F32, RANGE_CUT, SMALLEST_SCALE, TO_BITS, TO_VALUES, f16_bits, f16_values

HALF, ONE, ZERO = F32(0.5), F32(1), F32(0)
LARGEST = {"f16": F32(65504), "bf16": F32(3.3895313892515355e38), "f8e4m3": F32(448)}


class Rule:
    """What a store says about its groups."""

    def __init__(self, name, bits, params="f16", levels=0, clip=1.0, book=None, outliers=0):
        self.name, self.bits, self.params, self.levels = name, bits, params, levels
        self.clip, self.outliers = F32(clip), outliers
        self.book = None if book is None else np.asarray(book, F32)

    @property
    def top(self):
        return F32(2 if self.levels == 3 else (1 << self.bits) - 1)

    @property
    def middle(self):  # m of the symmetric rule
        return F32(1 if self.levels == 3 else (1 << (self.bits - 1)) - 1)

    @property
    def has_offsets(self):
        return self.name in ("asym", "midpoint", "integer", "hybrid_1bit", "hybrid_4level", "codebook_range")

    @property
    def has_scales(self):
        return self.name != "codebook_fixed"

    def to_bits(self, x):
        return TO_BITS[self.params](x)

    def to_values(self, bits):
        return TO_VALUES[self.params](bits)

    def stored(self, x):
        return self.to_values(self.to_bits(x))


class Groups:
    """Encoded groups: codes [n][groups], stored scale and offset bits [groups]."""

    def __init__(self, codes, scale, offset):
        self.codes, self.scale, self.offset = codes, scale, offset


def ends(x, live=None):
    """min and max of each group, cut, with one sign of zero."""
    if live is None:
        low, high = x.min(axis=0), x.max(axis=0)
    else:
        low = np.where(live, x, F32(np.inf)).min(axis=0)
        high = np.where(live, x, F32(-np.inf)).max(axis=0)
        low, high = np.where(np.isinf(low), ZERO, low), np.where(np.isinf(high), ZERO, high)
    return np.clip(low, -RANGE_CUT, RANGE_CUT) + ZERO, np.clip(high, -RANGE_CUT, RANGE_CUT) + ZERO


def inverse(s, dead):
    """1 / s, and 0 where the group has no scale."""
    return np.where(dead, ZERO, ONE / np.where(dead, ONE, s))


def quantize(x, z, s, dead, top):
    codes = np.rint((x - z) * inverse(s, dead))
    return np.where(dead, ZERO, np.clip(codes, ZERO, top)).astype(np.uint16)


def constant_offset(low, high):
    """What a group with one level stores."""
    return np.where(low == high, low, HALF * low + HALF * high)


def encode_asym(x, rule, low, high, whole, bits=None):
    top = rule.top if bits is None else F32((1 << bits) - 1)
    midpoint = rule.name == "midpoint" and rule.bits == 1
    if rule.bits == 0:
        zeros = np.zeros(x.shape, np.uint16)
        return Groups(zeros, rule.to_bits(np.zeros_like(low)), rule.to_bits(constant_offset(*whole)))
    s = rule.stored((high - low) / (F32(2) if midpoint else top))
    dead = s < SMALLEST_SCALE
    s = np.where(dead, ZERO, s)
    z = (F32(0.75) * low + F32(0.25) * high) if midpoint else low
    z_bits = rule.to_bits(np.where(dead, constant_offset(*whole), z))
    return Groups(quantize(x, rule.to_values(z_bits), s, dead, top), rule.to_bits(s), z_bits)


def encode_integer(x, rule, low, high, whole):
    s = rule.stored((high - low) / rule.top)
    dead = s < SMALLEST_SCALE
    fits = rule.stored(np.abs(low) / (HALF * LARGEST[rule.params]))  # with it the offset fits its type
    s = np.where(dead, ZERO, np.maximum(s, fits))
    steps = np.rint(low / np.where(dead, ONE, s)) + ZERO  # a whole number has one zero
    n_bits = rule.to_bits(np.where(dead, constant_offset(*whole), steps))
    return Groups(quantize(x, s * rule.to_values(n_bits), s, dead, rule.top), rule.to_bits(s), n_bits)


def encode_centred(x, s, middle, top, rule):
    """Rules without offsets, whose code of 0 is `middle`."""
    dead = np.abs(s) < SMALLEST_SCALE
    s = np.where(dead, ZERO, s)
    codes = np.clip(np.rint(x * inverse(s, dead)) + middle, ZERO, top).astype(np.uint16)
    return Groups(codes, rule.to_bits(s), None)


def encode_symmetric(x, rule, low, high):
    s = rule.stored(np.maximum(np.abs(low), np.abs(high)) / rule.middle)
    return encode_centred(x, s, rule.middle, F32(2) * rule.middle, rule)


def encode_extreme(x, rule, low, high):
    half = F32(1 << (rule.bits - 1))
    s = rule.stored(np.where(-low > high, low, high) / -half)
    return encode_centred(x, s, half, rule.top, rule)


def error_sum(decoded, x):
    total = np.zeros(x.shape[1], F32)
    for one in np.abs(decoded - x):
        total = total + one
    return total


def encode_hybrid(x, rule, low, high, whole):
    symmetric = encode_symmetric(x, rule, low, high)
    asym = encode_asym(x, rule, low, high, whole, 1 if rule.name == "hybrid_1bit" else rule.bits)
    s, z = rule.to_values(symmetric.scale), F32(0)
    of_symmetric = (-rule.middle * s) + s * symmetric.codes.astype(F32)
    s, z = rule.to_values(asym.scale), rule.to_values(asym.offset)
    of_asym = z + s * asym.codes.astype(F32)
    take = error_sum(of_symmetric, x) < error_sum(of_asym, x)
    sign = asym.scale.dtype.type(0x80 if rule.params == "f8e4m3" else 0x8000)
    return Groups(np.where(take, symmetric.codes, asym.codes), np.where(take, symmetric.scale, asym.scale | sign),
                  np.where(take, asym.offset.dtype.type(0), asym.offset))


def nearest(y, book):
    middles = HALF * (book[:-1] + book[1:])
    return (y[None] > middles.reshape((-1,) + (1,) * y.ndim)).sum(axis=0).astype(np.uint16)


def norm(x):
    """2-norm along the first axis: eight parts, folded."""
    parts = np.zeros((8,) + x.shape[1:], F32)
    for i in range(x.shape[0]):
        parts[i % 8] = parts[i % 8] + x[i] * x[i]
    parts = parts[:4] + parts[4:]
    parts = parts[:2] + parts[2:]
    return np.sqrt(parts[0] + parts[1])


def encode_codebook_norm(x, rule):
    length = norm(x)
    dead = (length < SMALLEST_SCALE) | (length > RANGE_CUT)
    root = F32(np.sqrt(np.float64(x.shape[0])))
    codes = nearest(x * (root / np.where(dead, ONE, length)), rule.book)
    s = rule.stored(np.where(dead, ZERO, length / norm(rule.book[codes])))
    return Groups(np.where(dead, 0, codes).astype(np.uint16), rule.to_bits(np.where(s < SMALLEST_SCALE, ZERO, s)), None)


def range_outliers(x, count):
    """In turn the largest and the smallest value that is left; equal values: the lower channel. Mask [n][groups]."""
    apart = np.zeros(x.shape, bool)
    columns = np.arange(x.shape[1])
    for turn in range(count):
        left = np.where(apart, F32(-np.inf), x) if turn % 2 == 0 else np.where(apart, F32(np.inf), x)
        apart[left.argmax(axis=0) if turn % 2 == 0 else left.argmin(axis=0), columns] = True
    return apart


def fixed_outliers(x, count):
    """The values of largest magnitude above 1."""
    apart = np.zeros(x.shape, bool)
    columns = np.arange(x.shape[1])
    for _ in range(count):
        left = np.where(apart, ZERO, np.abs(x))
        first = left.argmax(axis=0)
        apart[first, columns] |= left[first, columns] > ONE
    return apart


def encode_codebook_range(x, rule, apart):
    low, high = ends(x, ~apart)
    s = rule.stored(HALF * high - HALF * low)
    dead = s < SMALLEST_SCALE
    s = np.where(dead, ZERO, s)
    z_bits = rule.to_bits(np.where(dead, constant_offset(low, high), HALF * high + HALF * low))
    codes = nearest((x - rule.to_values(z_bits)) * inverse(s, dead), rule.book)
    return Groups(np.where(dead, 0, codes).astype(np.uint16), rule.to_bits(s), z_bits)


def encode(x, rule, apart=None):
    """x [n][groups] fp32. `apart`: values kept apart, which the range rule leaves out of its range."""
    x = np.asarray(x, F32)
    if rule.name == "codebook_norm":
        return encode_codebook_norm(x, rule)
    if rule.name == "codebook_fixed":
        return Groups(nearest(x, rule.book), None, None)
    if rule.name == "codebook_range":
        return encode_codebook_range(x, rule, apart)
    whole = ends(x)  # a group with one level is stored by these, the others by the clipped range
    low, high = whole[0] * rule.clip, whole[1] * rule.clip
    if rule.name == "integer":
        return encode_integer(x, rule, low, high, whole)
    if rule.name == "symmetric":
        return encode_symmetric(x, rule, low, high)
    if rule.name == "extreme":
        return encode_extreme(x, rule, low, high)
    if rule.name.startswith("hybrid"):
        return encode_hybrid(x, rule, low, high, whole)
    return encode_asym(x, rule, low, high, whole)


def decode(groups, rule):
    """[n][groups] fp32, from what is stored alone."""
    level = rule.book[groups.codes] if rule.book is not None else groups.codes.astype(F32)
    if not rule.has_scales:
        return level
    s = rule.to_values(groups.scale)
    z = rule.to_values(groups.offset) if rule.has_offsets else None
    if rule.name == "integer":
        z = np.where(s == 0, z, s * z)
    elif rule.name == "symmetric":
        z = -rule.middle * s
    elif rule.name == "extreme":
        z = -F32(1 << (rule.bits - 1)) * s
    elif rule.name == "codebook_norm":
        z = np.zeros_like(s)
    elif rule.name.startswith("hybrid"):
        asym = np.signbit(s)
        s = np.abs(s)
        z = np.where(asym, z, -rule.middle * s)
    return z + s * level


def outlier_slots(x, apart, count):
    """[groups][count] of (channel, f16 bits) in the order of channels; 0xFFFF and 0 where a slot is left over."""
    channels = np.full((x.shape[1], count), 0xFFFF, np.uint16)
    values = np.zeros((x.shape[1], count), np.uint16)
    for g in range(x.shape[1]):
        found = np.flatnonzero(apart[:, g])
        channels[g, : len(found)] = found
        values[g, : len(found)] = f16_bits(x[found, g])
    return channels, values


def put_outliers(decoded, channels, values):
    """Overwrites decoded [n][groups] with the values kept apart."""
    for g in range(decoded.shape[1]):
        live = channels[g] != 0xFFFF
        decoded[channels[g][live], g] = f16_values(values[g][live])
    return decoded
