"""Writes a few small, sound GGUF files as a start for gguf_fuzz. Usage: gguf_corpus.py FOLDER"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import gguf_writer as w  # noqa: E402


def small(vocab, layers):
    g = w.tiny_llama(layers=layers, vocab=vocab)
    for t in g.tensors:  # shapes do not matter here, but the files should be short
        t.dims, t.data, t.nbytes = [8], bytes(32), 32
    return g


def main(folder):
    os.makedirs(folder, exist_ok=True)
    files = {"spm": small(w.spm_vocab, 1), "bpe": small(w.bpe_vocab, 2), "align8": small(w.bpe_vocab, 1).align(8)}
    experts = small(w.spm_vocab, 1).set("llama.expert_count", w.U32, 4).set("llama.expert_used_count", w.U32, 2)
    files["experts"] = experts.set("llama.rope.scaling.type", w.STR, "yarn")
    files["arrays"] = small(w.spm_vocab, 2).set("llama.attention.head_count", w.ARR, (w.U32, [2, 2]))
    split = small(w.spm_vocab, 1).set("split.no", w.U16, 0).set("split.count", w.U16, 2)
    files["split"] = split.set("split.tensors.count", w.I32, 11)
    for name, g in files.items():
        g.write(os.path.join(folder, name + ".gguf"))


if __name__ == "__main__":
    main(sys.argv[1])
