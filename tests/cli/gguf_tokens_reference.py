"""A byte-pair encoder written for the tests: splits by the published rules of two pre-tokenizers, then merges by rank.

Reads vocabulary and merges from the model's GGUF file with a reader of its own. Letters are `[^\\W\\d_]`, which
equals \\p{L} for the texts below. Sources of the split rules: GPT-2's published pattern with single digits first
(SmolLM's tokenizer.json: Digits individual, then ByteLevel) and the pattern in Qwen2's tokenizer.json.
"""

import re
import struct

from gguf_writer import ARR, PACK, STR, byte_symbols

LETTER = r"[^\W\d_]"
GPT2 = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?%s+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+" % LETTER)
QWEN2 = re.compile(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?%s+|\d| ?(?:[^\s\w]|_)+[\r\n]*"
                   r"|\s*[\r\n]+|\s+(?!\S)|\s+" % LETTER)


def split_smollm(text):
    for part in re.findall(r"\d|\D+", text):
        yield from GPT2.findall(part)


SPLITS = {"smollm": split_smollm, "qwen2": QWEN2.findall}

TEXTS = ["1" * n for n in range(1, 13)] + ["a" + "0123456789" * 2 + "b", "7 77 777", " 42", "3.14159", "1,000,000"]
TEXTS += ["v2.0b3", "snake_case __init__ _", "a_1"]
TEXTS += ["I'm you're he'll they've it's don't we'd", "I'M YOU'RE", "'s", "' s", "''", "rock 'n' roll"]
TEXTS += [" " * n for n in range(1, 9)] + ["a" + " " * n + "b" for n in range(1, 9)]
TEXTS += ["\n" * n for n in range(1, 5)]
TEXTS += ["a\n\n\nb", "a \n b", "\t\tx", " \n \n", "a\r\nb", "x\n  y\n    z", "end \n"]
TEXTS += ["!!!", "a!b?c", " ...", "(a)[b]{c}", "a - b -- c", "x=y+1;", "#!$%&*", "\"quoted\"", "path/to/file.txt"]
TEXTS += ["?!\n\nNext", "it's_me'll"]
TEXTS += ["Hello, world", "hello", " hello", "HelloWorld", "The quick brown fox", "na\u00efve caf\u00e9",
          "\u4f60\u597d", "\u043f\u0440\u0438\u0432\u0435\u0442", "\U0001f600", "a\U0001f600b \u20ac5"]


class Encoder:
    def __init__(self, path):
        with open(path, "rb") as f:
            values = read_values(f)
        self.pre = values["tokenizer.ggml.pre"]
        self.ids = {t: i for i, t in enumerate(values["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ", 1)): i for i, m in enumerate(values["tokenizer.ggml.merges"])}
        self.symbols = byte_symbols()

    def encode(self, text):
        out = []
        for word in SPLITS[self.pre](text):
            parts = [self.symbols[b] for b in word.encode("utf-8")]
            while len(parts) > 1:
                pairs = [(self.ranks.get(pair, 1 << 60), i) for i, pair in enumerate(zip(parts, parts[1:]))]
                rank, at = min(pairs)
                if rank == 1 << 60:
                    break
                parts[at:at + 2] = [parts[at] + parts[at + 1]]
            out += [self.ids[p] for p in parts]
        return out


def read_values(f):
    def take(fmt):
        return struct.unpack("<" + fmt, f.read(struct.calcsize("<" + fmt)))[0]

    def text():
        return f.read(take("Q")).decode("utf-8")

    def value(kind):
        if kind == STR:
            return text()
        if kind != ARR:
            return take(PACK[kind])
        element, n = take("I"), take("Q")
        if element == STR:
            return [text() for _ in range(n)]
        return f.read(n * struct.calcsize(PACK[element]))

    assert f.read(4) == b"GGUF" and take("I") == 3
    take("Q")
    return {text(): value(take("I")) for _ in range(take("Q"))}
