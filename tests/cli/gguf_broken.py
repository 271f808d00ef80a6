"""Broken GGUF files, one function each: what is wrong, and what the answer must say.

Each function gets a sound little model, spoils it, and may return bytes to be written instead. `says` is a regular
expression for the one sentence; `by="libllama"` marks what the pre-flight check leaves to libllama, which answers for
it well.
"""

import struct

from gguf_writer import (ARR, BOOL, F32, I32, STR, U16, U32, U64, Tensor, bpe_vocab, gguf_string, gguf_value, ones,
                         tiny_llama)

CASES = []


def broken(says, by="check", vocab=None):
    def add(function):
        def build():
            g = tiny_llama(vocab=vocab) if vocab else tiny_llama()
            data = function(g)
            return data if isinstance(data, bytes) else g.bytes()

        CASES.append((function.__name__, says, by, build))
        return function

    return add


def huge_array(element, n):
    return struct.pack("<IQ", element, n)


# ---- not a GGUF file at all ----


@broken(r"is empty; expected a GGUF model file")
def empty_file(g):
    return b""


@broken(r"starts with 'G', expected 'GGUF'")
def one_byte(g):
    return b"G"


@broken(r"ends inside the 24-byte GGUF header \(file size 23 bytes\)")
def header_cut(g):
    return g.bytes()[:23]


@broken(r"starts with 'NOPE', expected 'GGUF'$")
def wrong_magic(g):
    g.magic = b"NOPE"


@broken(r"starts with 'PK\?\?', expected 'GGUF'; it looks like a ZIP archive")
def zip_archive(g):
    return b"PK\3\4" + bytes(100)


@broken(r"it looks like a safetensors file")
def safetensors(g):
    return struct.pack("<Q", 40) + b'{"__metadata__":{"format":"pt"}}' + bytes(64)


@broken(r"it looks like a Git LFS pointer")
def lfs_pointer(g):
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@broken(r"it looks like a web page")
def web_page(g):
    return b"<!DOCTYPE html><html><body>404</body></html>"


# ---- J9: byte order and version ----


@broken(r"is a big-endian GGUF file")
def j9_big_endian(g):
    g.version = b"\0\0\0\3"


@broken(r"has GGUF version 0; allowed are 2 and 3")
def version_0(g):
    g.version = 0


@broken(r"has GGUF version 1; allowed are 2 and 3")
def version_1(g):
    g.version = 1


@broken(r"has GGUF version 4; allowed are 2 and 3")
def version_4(g):
    g.version = 4


# ---- J1: zero or empty fields ----


@broken(r"tensor 'blk\.0\.attn_q\.weight' has dimension 2 = 0; allowed are 1 to \d+")
def j1_dimension_4_0(g):
    g.tensor("blk.0.attn_q.weight").dims = [4, 0]


@broken(r"tensor 'output_norm\.weight' has dimension 1 = 0; allowed are 1 to \d+")
def j1_dimension_0(g):
    g.tensor("output_norm.weight").dims = [0]


@broken(r"tensor 'output_norm\.weight' has 0 dimensions; allowed are 1 to 4")
def j1_no_dimensions(g):
    g.tensor("output_norm.weight").dims = []


@broken(r"key 3 of \d+ is empty")
def j1_empty_key(g):
    g.kv.insert(2, ("", U32, 1))


@broken(r"the name of tensor 2 of \d+ is empty")
def j1_empty_name(g):
    g.tensors[1].name = ""


@broken(r"llama\.block_count is 0; allowed are 1 to 512")
def j1_no_layers(g):
    g.set("llama.block_count", U32, 0)


@broken(r"has no tensors")
def j1_no_tensors(g):
    g.tensors = []


@broken(r"has no general\.architecture")
def j1_no_pairs(g):
    g.kv = []


# ---- J3: counts as attack ----


@broken(r"announces 18446744073709551615 tensors; \d+ bytes left and our limit allow at most \d+")
def j3_tensor_count(g):
    g.n_tensors = 2**64 - 1


@broken(r"announces 1152921504606846976 key-value pairs; \d+ bytes left and our limit allow at most \d+")
def j3_pair_count(g):
    g.n_kv = 2**60


@broken(r"array 'zz\.numbers' announces 1152921504606846976 elements of type u32; \d+ bytes left")
def j3_array_of_2_to_60(g):
    g.kv.insert(0, ("zz.numbers", ARR, huge_array(U32, 2**60)))


@broken(r"array 'zz\.texts' announces 2305843009213693951 elements of type string")
def j3_strings_that_wrap(g):
    g.kv.insert(0, ("zz.texts", ARR, huge_array(STR, 2**61 - 1)))


@broken(r"array 'zz\.odd' has element type 77; allowed are 0 to 12")
def j3_unknown_element(g):
    g.kv.insert(0, ("zz.odd", ARR, huge_array(77, 3) + bytes(12)))


@broken(r"array 'zz\.nested' has element type 9; .*nested")
def j3_nested_array(g):
    inner = gguf_value(ARR, (U32, [1, 2]))
    g.kv.insert(0, ("zz.nested", ARR, huge_array(ARR, 1) + inner))


@broken(r"key 'zz\.odd' has value type 13; allowed are 0 to 12")
def j3_unknown_type(g):
    g.kv.insert(0, ("zz.odd", 13, bytes(8)))


@broken(r"key 'zz\.text' has length 18446744073709551608; allowed are at most \d+ bytes")
def j3_string_length_wraps(g):
    g.kv.insert(0, ("zz.text", 8, b""))
    raw = gguf_string("zz.text") + struct.pack("<I", STR)
    head = g.bytes()
    return head.replace(raw + struct.pack("<Q", 0), raw + struct.pack("<Q", 2**64 - 8), 1)


@broken(r"key 1 of \d+ has length 4294967296; allowed are at most \d+ bytes")
def j3_key_length(g):
    data = g.bytes()
    return data[:24] + struct.pack("<Q", 2**32) + data[32:]


@broken(r"has length 64; allowed are at most 63 bytes")
def j3_long_tensor_name(g):
    g.tensors[0].name = "n" * 64


@broken(r"tensor 'output_norm\.weight' has 9 dimensions; allowed are 1 to 4")
def j3_nine_dimensions(g):
    g.tensor("output_norm.weight").dims = [1] * 9


@broken(r"tensor 'output_norm\.weight' has 4294967295 dimensions; allowed are 1 to 4")
def j3_dimensions_2_to_32(g):
    g.tensor("output_norm.weight").n_dims = 2**32 - 1


@broken(r"has dimension 2 = 8589934592; allowed are 1 to \d+ after the dimensions before it")
def j3_dimensions_overflow(g):
    g.tensor("blk.0.attn_q.weight").dims = [2**31, 2**33]


@broken(r"has dimension 1 = 18446744073709551615; allowed")
def j3_negative_dimension(g):
    g.tensor("blk.0.attn_q.weight").dims = [-1, 64]


@broken(r"tensor 'blk\.0\.attn_q\.weight' takes more than 2\^62 bytes")
def j3_bytes_overflow(g):
    g.tensor("blk.0.attn_q.weight").dims = [2**31, 2**31]


@broken(r"key 'general\.name' appears twice")
def j3_duplicate_key(g):
    g.kv.append(("general.name", STR, "again"))


@broken(r"tensor 'blk\.0\.attn_k\.weight' appears twice")
def j3_duplicate_tensor(g):
    g.tensor("blk.0.attn_v.weight").name = "blk.0.attn_k.weight"


@broken(r"tensor 'output_norm\.weight' has type 43, which libllama does not know; allowed are 0 to 42")
def j3_unknown_tensor_type(g):
    g.tensor("output_norm.weight").kind = 43


@broken(r"tensor 'output_norm\.weight' has type 4, which libllama does not know")
def j3_retired_tensor_type(g):
    g.tensor("output_norm.weight").kind = 4


@broken(r"has rows of 8 values; its type 2 allows multiples of 32")
def j3_partial_block(g):
    g.tensor("blk.0.attn_q.weight").kind, g.tensor("blk.0.attn_q.weight").dims = 2, [8, 64]


@broken(r"tensor 'blk\.0\.attn_q\.weight' has offset 18446744073709551584; allowed is \d+")
def j3_offset_wraps(g):
    g.tensor("blk.0.attn_q.weight").offset = 2**64 - 32


@broken(r"tensor 'blk\.0\.attn_k\.weight' has offset 0; allowed is \d+")
def j3_offsets_overlap(g):
    g.tensor("blk.0.attn_k.weight").offset = 0


@broken(r"tensor 'blk\.0\.ffn_down\.weight' needs bytes \d+ to \d+, but the file ends at \d+")
def data_cut(g):
    return g.bytes()[:-1]


@broken(r"tensor 'token_embd\.weight' needs bytes \d+ to \d+, but the file ends at \d+")
def no_data(g):
    return g.header()


# ---- J4: alignment ----


@broken(r"general\.alignment is 0, not a positive multiple of 8; allowed are the powers of two from 8")
def j4_alignment_0(g):
    g.set("general.alignment", U32, 0)


@broken(r"general\.alignment is 7, not a positive multiple of 8")
def j4_alignment_7(g):
    g.align(7)


@broken(r"general\.alignment is 4, not a positive multiple of 8")
def j4_alignment_4(g):
    g.align(4)


@broken(r"general\.alignment has type i32; allowed is u32")
def j4_alignment_negative(g):
    g.set("general.alignment", I32, -32)


@broken(r"general\.alignment is 24, which the format permits but libllama does not load; allowed are the powers of two")
def j4_alignment_24(g):
    g.align(24)


@broken(r"general\.alignment is 4294967264, which the format permits but libllama does not load")
def j4_alignment_minus_32_as_u32(g):
    g.set("general.alignment", U32, 2**32 - 32)


@broken(r"general\.alignment has type u64; allowed is u32")
def j4_alignment_u64(g):
    g.set("general.alignment", U64, 32)


@broken(r"general\.alignment has type string; allowed is u32")
def j4_alignment_text(g):
    g.set("general.alignment", STR, "32")


@broken(r"general\.alignment has type u16; allowed is u32")
def j4_alignment_u16(g):
    g.set("general.alignment", U16, 32)


# ---- J10 and K4: vocabulary ----


@broken(r"tokenizer\.ggml\.eos_token_id is 4294967295; allowed are 0 to 270")
def j10_eos_outside(g):
    g.set("tokenizer.ggml.eos_token_id", U32, 2**32 - 1)


@broken(r"eos_token_id is 4294967295; allowed are 0 to 0 \(the vocabulary has 1 token\)", vocab=bpe_vocab)
def j10_one_token(g):
    g.set("tokenizer.ggml.tokens", ARR, (STR, ["a"])).set("tokenizer.ggml.token_type", ARR, (I32, [1]))
    g.set("tokenizer.ggml.bos_token_id", U32, 0).set("tokenizer.ggml.eos_token_id", U32, 2**32 - 1)


@broken(r"tokenizer\.ggml\.bos_token_id is 271; allowed are 0 to 270")
def j10_bos_just_outside(g):
    g.set("tokenizer.ggml.bos_token_id", U32, 271)


@broken(r"there is no tokenizer\.ggml\.bos_token_id and its default 11 is outside", vocab=bpe_vocab)
def j10_default_outside(g):
    g.drop("tokenizer.ggml.bos_token_id").set("tokenizer.ggml.add_bos_token", BOOL, True)
    g.set("tokenizer.ggml.tokens", ARR, (STR, ["a", "b"])).set("tokenizer.ggml.eos_token_id", U32, 0)


@broken(r"model is 'llama' but there are no tokenizer\.ggml\.scores; .*byte-pair vocabulary", vocab=bpe_vocab)
def k4_byte_pairs_called_sentencepiece(g):
    g.set("tokenizer.ggml.model", STR, "llama")


@broken(r"model is 'llama' but the vocabulary has no byte token '<0x00>'.*byte-pair vocabulary", vocab=bpe_vocab)
def k4_byte_pairs_with_scores(g):
    n = len(g.value("tokenizer.ggml.tokens")[1])
    g.set("tokenizer.ggml.model", STR, "llama").set("tokenizer.ggml.scores", ARR, (F32, [0.0] * n))


@broken(r"model is 'gpt2' but there are no tokenizer\.ggml\.merges; .*SentencePiece vocabulary")
def k4_sentencepiece_called_byte_pairs(g):
    g.set("tokenizer.ggml.model", STR, "gpt2")


@broken(r"model is 'gpt2' but there are no tokenizer\.ggml\.merges", vocab=bpe_vocab)
def k4_merges_absent(g):
    g.drop("tokenizer.ggml.merges")


@broken(r"model is 'llama' but there are no tokenizer\.ggml\.scores")
def k4_scores_absent(g):
    g.drop("tokenizer.ggml.scores")


@broken(r"tokenizer\.ggml\.scores has 10 elements; allowed is 271, one per token")
def k4_scores_short(g):
    g.set("tokenizer.ggml.scores", ARR, (F32, [0.0] * 10))


@broken(r"tokenizer\.ggml\.token_type has 0 elements; allowed is 271")
def k4_types_short(g):
    g.set("tokenizer.ggml.token_type", ARR, (I32, []))


@broken(r"tokenizer\.ggml\.merges has type string; allowed is an array of strings", vocab=bpe_vocab)
def k4_merges_wrong_type(g):
    g.set("tokenizer.ggml.merges", STR, "h e")


@broken(r"tokens element 5 is '<0x00>', which an earlier token is too")
def duplicate_token(g):
    g.value("tokenizer.ggml.tokens")[1][5] = "<0x00>"


@broken(r"token 1 is '<s>' but marked as a byte")
def byte_mark_on_text(g):
    g.value("tokenizer.ggml.token_type")[1][1] = 6


@broken(r"tokenizer\.ggml\.tokens has 0 elements")
def no_tokens(g):
    g.set("tokenizer.ggml.tokens", ARR, (STR, []))


@broken(r"has no tokenizer\.ggml\.model")
def no_tokenizer(g):
    g.kv = [entry for entry in g.kv if not entry[0].startswith("tokenizer.")]


@broken(r"tokenizer\.ggml\.model is 'none', a model without a vocabulary")
def no_vocabulary(g):
    g.set("tokenizer.ggml.model", STR, "none").set("llama.vocab_size", U32, 271)


@broken(r"unknown tokenizer: 'mystery'", by="libllama")
def unknown_tokenizer(g):
    g.set("tokenizer.ggml.model", STR, "mystery")


@broken(r"unknown pre-tokenizer type: 'mystery'", by="libllama", vocab=bpe_vocab)
def k2_unknown_pre_tokenizer(g):
    g.set("tokenizer.ggml.pre", STR, "mystery")


# ---- sizes that libllama asserts on ----


@broken(r"llama\.block_count is 4294967295; allowed are 1 to 512")
def layers_2_to_32(g):
    g.set("llama.block_count", U32, 2**32 - 1)


@broken(r"llama\.block_count has type u64; allowed is u32")
def layers_u64(g):
    g.set("llama.block_count", U64, 1)


@broken(r"has no llama\.embedding_length")
def no_width(g):
    g.drop("llama.embedding_length")


@broken(r"llama\.attention\.head_count_kv is 3 in layer 0; allowed are divisors of its 2 query heads")
def kv_heads_do_not_divide(g):
    g.set("llama.attention.head_count_kv", U32, 3)


@broken(r"llama\.attention\.head_count has 3 elements; allowed is 1, one per layer")
def heads_per_layer_wrong(g):
    g.set("llama.attention.head_count", ARR, (U32, [2, 2, 2]))


@broken(r"llama\.expert_used_count is 9; allowed are 1 to 8")
def too_many_experts_used(g):
    g.set("llama.expert_count", U32, 8).set("llama.expert_used_count", U32, 9)


@broken(r"llama\.expert_count is 5000; allowed are 0 to 1024")
def too_many_experts(g):
    g.set("llama.expert_count", U32, 5000).set("llama.expert_used_count", U32, 1)


@broken(r"llama\.rope\.scaling\.type is 'spiral'; allowed are none, linear, yarn and longrope")
def unknown_rope_scaling(g):
    g.set("llama.rope.scaling.type", STR, "spiral")


@broken(r"llama\.attention\.layer_norm_rms_epsilon is -?nan; allowed are finite numbers")
def epsilon_nan(g):
    g.set("llama.attention.layer_norm_rms_epsilon", F32, float("nan"))


@broken(r"tensor 'output_norm\.weight' has type 2; allowed for norms, biases and vectors is 0")
def quantized_norm(g):
    t = g.tensor("output_norm.weight")
    t.kind, t.data, t.nbytes = 2, bytes(36), 36


@broken(r"tensor 'token_embd\.weight' has type 24; not allowed for weights")
def integer_weights(g):
    t = g.tensor("token_embd.weight")
    t.kind, t.data, t.nbytes = 24, t.data[: len(t.data) // 4], len(t.data) // 4


@broken(r"general\.type is 'adapter'; only 'model' can be run")
def adapter_file(g):
    g.set("general.type", STR, "adapter")


@broken(r"general\.architecture is 'clip', an image encoder")
def image_encoder(g):
    g.set("general.architecture", STR, "clip")


@broken(r"general\.architecture has type u32; allowed is string")
def architecture_number(g):
    g.set("general.architecture", U32, 7)


@broken(r"unknown model architecture: 'mystery'", by="libllama")
def unknown_architecture(g):
    g.kv = [(k.replace("llama.", "mystery."), t, "mystery" if v == "llama" else v) for k, t, v in g.kv]
    g.set("tokenizer.ggml.model", STR, "llama")


# ---- I3: tensors that are not there ----


@broken(r"tensor 'blk\.0\.attn_q\.weight' not found", by="libllama")
def i3_missing_query(g):
    g.drop_tensor("blk.0.attn_q.weight")


@broken(r"tensor 'output_norm\.weight' not found", by="libllama")
def i3_missing_output_norm(g):
    g.drop_tensor("output_norm.weight")


@broken(r"tensor 'token_embd\.weight' not found", by="libllama")
def i3_missing_embedding(g):
    g.drop_tensor("token_embd.weight")


@broken(r"wrong number of tensors", by="libllama")
def unused_tensor(g):
    g.tensors.append(Tensor("zz.unused.weight", [8], ones(8)))


@broken(r"tensor 'blk\.0\.attn_q\.weight' has wrong shape", by="libllama")
def wrong_shape(g):
    t = g.tensor("blk.0.attn_q.weight")
    t.dims = [t.dims[1], t.dims[0]]
