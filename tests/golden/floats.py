"""What the encoders of golden pages share: narrow floats, rounding, the order of channels."""

import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "reader"))
from kvpage_reader import read_float  # noqa: E402


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
