"""Narrow floats and the rounding of rows, by sections 1 and 2 of docs/numerics.md."""

import numpy as np

F32 = np.float32
F16_MAX = F32(65504.0)
SMALLEST_SCALE = F32(2.0**-126)
RANGE_CUT = F32(2.0**125)


def f16_bits(x):
    """fp32 to f16 bits: half to even, saturating, NaN stays NaN."""
    return np.clip(np.asarray(x, F32), -F16_MAX, F16_MAX).astype(np.float16).view(np.uint16)


def f16_values(bits):
    return np.asarray(bits, np.uint16).view(np.float16).astype(F32)


def bf16_bits(x):
    u = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    too_large = (rounded & 0x7FFF) >= 0x7F80
    saturated = (rounded & 0x8000) | 0x7F7F
    rounded = np.where(too_large, saturated, rounded).astype(np.uint16)
    return np.where(np.isnan(x), (u >> 16).astype(np.uint16) | 0x40, rounded).astype(np.uint16)


def bf16_values(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(F32)


def f8e4m3_bits(x):
    x = np.asarray(x, F32)
    sign = np.signbit(x)
    a = np.minimum(np.abs(x.astype(np.float64)), 448.0)  # exact in double from here on
    _, exponent = np.frexp(np.where(a > 0, a, 1.0))
    exponent = np.maximum(exponent - 1, -6)
    steps = np.rint(np.ldexp(a, 3 - exponent)).astype(np.int64)  # 8 .. 16 for normal values, 0 .. 8 below
    carry = steps == 16
    exponent, steps = exponent + carry, np.where(carry, 8, steps)
    code = np.where(steps < 8, steps, ((exponent + 7) << 3) + (steps - 8))
    code = np.where(np.isnan(x), 0x7F, np.minimum(code, 0x7E))
    return (code | (sign.astype(np.int64) << 7)).astype(np.uint8)


def f8e4m3_values(bits):
    bits = np.asarray(bits, np.uint8).astype(np.int64)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    value = np.where(exponent == 0, np.ldexp(mantissa / 8.0, -6), np.ldexp(1 + mantissa / 8.0, exponent - 7))
    value = np.where((exponent == 15) & (mantissa == 7), np.nan, value)
    return np.where(bits & 0x80, -value, value).astype(F32)


TO_BITS = {"f16": f16_bits, "bf16": bf16_bits, "f8e4m3": f8e4m3_bits}
TO_VALUES = {"f16": f16_values, "bf16": bf16_values, "f8e4m3": f8e4m3_values}


def rounded(kind, x):
    """fp32 rounded to a narrow type and back."""
    if kind == "f32":
        return np.asarray(x, F32)
    return TO_VALUES[kind](TO_BITS[kind](x))


def enter(x, raw):
    """Rows of K and V as the cache holds them. NaN becomes 0, infinities +-65504, the rest saturates."""
    x = np.where(np.isnan(x), F32(0), np.asarray(x, F32))
    x = np.where(np.isinf(x), np.copysign(F16_MAX, x), x)
    return rounded(raw, x)


def enter_query(q, raw):
    """Rows of q as statistics see them: rounded to the raw type, 0 where not finite."""
    return rounded(raw, np.where(np.isfinite(q), np.asarray(q, F32), F32(0)))
