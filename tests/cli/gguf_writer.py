"""Writes GGUF files, sound and unsound, from nothing but the standard library.

The layout is the published one of GGUF versions 2 and 3: magic, version, two counts, key-value pairs, tensor
infos, padding to `general.alignment`, tensor data. Every field can be overridden, because most of the files
that the tests want are wrong in exactly one place.
"""

import array
import random
import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0 = 0, 1, 2, 8


def gguf_string(text):
    raw = text if isinstance(text, bytes) else text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(kind, value):
    """The bytes of one value, without its type. An array's value is (element type, list)."""
    if kind == STR:
        return gguf_string(value)
    if kind == ARR:
        element, items = value
        head = struct.pack("<IQ", element, len(items))
        if element == STR:
            return head + b"".join(gguf_string(item) for item in items)
        return head + struct.pack("<%d%s" % (len(items), PACK[element]), *items)
    return struct.pack("<" + PACK[kind], value)


class Tensor:
    """One tensor: dims as in the file (fastest first), `data` its bytes. `offset` None means "right after the last"."""

    def __init__(self, name, dims, data, kind=TYPE_F32, offset=None, n_dims=None, nbytes=None):
        self.name, self.dims, self.data, self.kind = name, list(dims), data, kind
        self.offset, self.n_dims = offset, n_dims
        self.nbytes = len(data) if nbytes is None else nbytes  # larger than data: the rest is a hole in the file


class Gguf:
    def __init__(self):
        self.magic, self.version = b"GGUF", 3
        self.kv = []  # (key, type, value); a value of type bytes is written as it stands
        self.tensors = []
        self.alignment = 32
        self.n_kv = self.n_tensors = None  # overrides of the true counts
        self.pad_last = True
        self.trailing = b""

    def set(self, key, kind, value):
        for i, (old, _, _) in enumerate(self.kv):
            if old == key:
                self.kv[i] = (key, kind, value)
                return self
        self.kv.append((key, kind, value))
        return self

    def drop(self, key):
        self.kv = [entry for entry in self.kv if entry[0] != key]
        return self

    def value(self, key):
        return next(value for name, _, value in self.kv if name == key)

    def tensor(self, name):
        return next(t for t in self.tensors if t.name == name)

    def drop_tensor(self, name):
        self.tensors = [t for t in self.tensors if t.name != name]
        return self

    def align(self, alignment):
        self.alignment = alignment
        return self.set("general.alignment", U32, alignment)

    def pad(self, n):
        return -n % self.alignment

    def header(self):
        out = [self.magic, struct.pack("<I", self.version) if isinstance(self.version, int) else self.version]
        out.append(struct.pack("<Q", len(self.tensors) if self.n_tensors is None else self.n_tensors))
        out.append(struct.pack("<Q", len(self.kv) if self.n_kv is None else self.n_kv))
        for key, kind, value in self.kv:
            out += [gguf_string(key), struct.pack("<I", kind)]
            out.append(value if isinstance(value, bytes) and kind != STR else gguf_value(kind, value))
        offset = 0
        for t in self.tensors:
            out += [gguf_string(t.name), struct.pack("<I", len(t.dims) if t.n_dims is None else t.n_dims)]
            out += [struct.pack("<Q", dim & (2**64 - 1)) for dim in t.dims]
            out.append(struct.pack("<IQ", t.kind, offset if t.offset is None else t.offset))
            offset += t.nbytes + self.pad(t.nbytes)
        return b"".join(out)

    def bytes(self):
        head = self.header()
        out = [head, bytes(self.pad(len(head)))]
        for i, t in enumerate(self.tensors):
            out.append(t.data)
            if self.pad_last or i + 1 < len(self.tensors):
                out.append(bytes(self.pad(len(t.data))))
        out.append(self.trailing)
        return b"".join(out)

    def write(self, path):
        with open(path, "wb") as f:
            f.write(self.bytes())
        return path

    def write_sparse(self, path):
        """As write(), but a tensor's missing bytes become a hole, so gigabytes cost no disk."""
        head = self.header()
        with open(path, "wb") as f:
            f.write(head)
            at = len(head) + self.pad(len(head))
            for t in self.tensors:
                f.seek(at)
                f.write(t.data)
                at += t.nbytes + self.pad(t.nbytes)
            f.truncate(at)
        return path


def random_floats(rng, n, scale=0.25):
    return array.array("f", (rng.uniform(-scale, scale) for _ in range(n))).tobytes()


def ones(n):
    return array.array("f", [1.0] * n).tobytes()


def spm_vocab(g):
    """A SentencePiece-kind vocabulary: three control tokens, the 256 bytes, a few pieces."""
    pieces = ["\u2581", "e", "t", "a", "o", "h", "l", "\u2581t", "he", "\u2581the", "ll", "o\u2581"]
    tokens = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)] + pieces
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    g.set("tokenizer.ggml.model", STR, "llama").set("tokenizer.ggml.pre", STR, "default")
    g.set("tokenizer.ggml.tokens", ARR, (STR, tokens)).set("tokenizer.ggml.scores", ARR, (F32, scores))
    g.set("tokenizer.ggml.token_type", ARR, (I32, types))
    g.set("tokenizer.ggml.bos_token_id", U32, 1).set("tokenizer.ggml.eos_token_id", U32, 2)
    g.set("tokenizer.ggml.unknown_token_id", U32, 0)
    return tokens


def byte_symbols():
    """The printable stand-ins for the 256 bytes that byte-level BPE vocabularies use (published with GPT-2)."""
    shown = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 0
    for b in range(256):
        if b in shown:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def bpe_vocab(g, pre="gpt-2"):
    """A byte-pair vocabulary: the 256 byte symbols, three merges and two control tokens."""
    symbols = byte_symbols()
    merges = ["h e", "l l", "he ll"]
    tokens = [symbols[b] for b in range(256)] + [m.replace(" ", "") for m in merges] + ["<|start|>", "<|stop|>"]
    g.set("tokenizer.ggml.model", STR, "gpt2").set("tokenizer.ggml.pre", STR, pre)
    g.set("tokenizer.ggml.tokens", ARR, (STR, tokens)).set("tokenizer.ggml.merges", ARR, (STR, merges))
    g.set("tokenizer.ggml.token_type", ARR, (I32, [1] * (len(tokens) - 2) + [3, 3]))
    g.set("tokenizer.ggml.bos_token_id", U32, len(tokens) - 2).set("tokenizer.ggml.eos_token_id", U32, len(tokens) - 1)
    return tokens


def tiny_llama(layers=1, vocab=spm_vocab, tied=True, seed=1):
    """A whole llama-architecture model, random weights: hidden 64, 2 query heads on 1 KV head of 64 channels."""
    rng = random.Random(seed)
    g = Gguf()
    g.set("general.architecture", STR, "llama").set("general.name", STR, "tiny test model")
    hidden, heads, kv_heads, d, ff = 64, 2, 1, 64, 64
    for key, value in (("context_length", 512), ("embedding_length", hidden), ("block_count", layers),
                       ("feed_forward_length", ff), ("attention.head_count", heads),
                       ("attention.head_count_kv", kv_heads), ("attention.key_length", d),
                       ("attention.value_length", d), ("rope.dimension_count", d)):
        g.set("llama." + key, U32, value)
    g.set("llama.attention.layer_norm_rms_epsilon", F32, 1e-5)
    n_vocab = len(vocab(g))

    def add(name, *dims):
        n = 1
        for dim in dims:
            n *= dim
        g.tensors.append(Tensor(name, dims, ones(n) if "norm" in name else random_floats(rng, n)))

    add("token_embd.weight", hidden, n_vocab)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", hidden, n_vocab)
    for i in range(layers):
        block = "blk.%d." % i
        add(block + "attn_norm.weight", hidden)
        add(block + "attn_q.weight", hidden, heads * d)
        add(block + "attn_k.weight", hidden, kv_heads * d)
        add(block + "attn_v.weight", hidden, kv_heads * d)
        add(block + "attn_output.weight", heads * d, hidden)
        add(block + "ffn_norm.weight", hidden)
        add(block + "ffn_gate.weight", hidden, ff)
        add(block + "ffn_up.weight", hidden, ff)
        add(block + "ffn_down.weight", ff, hidden)
    return g
