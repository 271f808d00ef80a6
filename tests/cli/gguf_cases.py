#!/usr/bin/env python3
"""GGUF files through the front door: broken ones end in one sentence, odd but legal ones load and compute the same.

Usage: gguf_cases.py [-v] [unittest names], with in the environment
  KVMOSAIC_GGUF_PROBE   the program gguf_probe (the pre-flight check by itself); required
  KVMOSAIC_PROGRAM      the program kvmosaic; without it the tests that need it are skipped
  KVMOSAIC_GGUF_TOKENS  the program gguf_tokens; likewise
  KVMOSAIC_MODELS       folder with tiny.gguf and small.gguf (default ~/.cache/kvmosaic/models)
  KVMOSAIC_NO_LIMITS    set under sanitizers, whose shadow memory no limit on addresses survives
"""

import array
import concurrent.futures
import os
import random
import re
import resource
import subprocess
import tempfile
import unittest

import gguf_broken
import gguf_tokens_reference as reference
from gguf_writer import ARR, F32, I32, STR, U16, U32, Gguf, Tensor, bpe_vocab, random_floats, spm_vocab, tiny_llama

PROBE = os.environ.get("KVMOSAIC_GGUF_PROBE", "")
PROGRAM = os.environ.get("KVMOSAIC_PROGRAM", "")
TOKENS = os.environ.get("KVMOSAIC_GGUF_TOKENS", "")
MODELS = os.environ.get("KVMOSAIC_MODELS", os.path.expanduser("~/.cache/kvmosaic/models"))
CPU_SECONDS = 20  # for one file, typical is a tenth; a limit on work, not on waiting, so that a busy machine passes


def limits(gib):
    def apply():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        cpu = CPU_SECONDS * (5 if gib > 4 else 1)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        if not os.environ.get("KVMOSAIC_NO_LIMITS"):
            resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))

    return apply


def call(args, gib=2, stdin=""):
    return subprocess.run(args, input=stdin, capture_output=True, text=True, errors="replace", timeout=20 * CPU_SECONDS,
                          preexec_fn=limits(gib), env=dict(os.environ, GGML_NO_BACKTRACE="1"))


def run_model(path, n=1, gib=2):
    return call([PROGRAM, "run", "-m", path, "--raw", "-p", "hello the", "-n", str(n), "--temp", "0", "--cache", "f16"],
                gib)


def in_parallel(function, items):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, items))


class Folder(unittest.TestCase):
    def setUp(self):
        self.maxDiff = None
        self.folder = tempfile.TemporaryDirectory(prefix="kvmosaic-gguf-")
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def probe(self, path):
        """What the check says: "ok …" or "error …", exactly one line."""
        done = call([PROBE, path], gib=1)
        self.assertIn(done.returncode, (0, 1), done.stderr)
        self.assertEqual(done.stdout.count("\n"), 1, done.stdout)
        return done.stdout.strip()

    def refused(self, path, says, named=None, command=None):
        """The program gives one sentence about the file, and neither output nor a signal."""
        done = call(command) if command else run_model(path)
        self.assertGreater(done.returncode, 0, "%s: %s" % (path, done.stderr))
        self.assertLess(done.returncode, 126, "%s: %s" % (path, done.stderr))
        errors = [line for line in done.stderr.splitlines() if "error" in line.split(path)[0]]
        self.assertEqual(len(errors), 1, "%s: %s" % (path, done.stderr))
        self.assertRegex(errors[0], r"^kvmosaic: error: ")
        self.assertRegex(errors[0], says)
        self.assertIn(named or path, errors[0])
        self.assertEqual(done.stdout, "", path)

    def text(self, path, n=8, gib=2):
        done = run_model(path, n, gib)
        self.assertEqual(done.returncode, 0, "%s: %s" % (path, done.stderr))
        return done.stdout


class Broken(Folder):
    def write_all(self):
        for name, says, by, build in gguf_broken.CASES:
            path = self.path(name + ".gguf")
            with open(path, "wb") as f:
                f.write(build())
            yield name, says, by, path

    def test_check(self):
        for name, says, by, path in self.write_all():
            with self.subTest(name):
                answer = self.probe(path)
                if by == "check":
                    self.assertRegex(answer, r"^error \d " + re.escape(path) + ": ")
                    self.assertRegex(answer, says)
                else:
                    self.assertRegex(answer, "^ok ")

    @unittest.skipUnless(PROGRAM, "no program")
    def test_program(self):
        cases = list(self.write_all())

        def one(case):
            name, says, _, path = case
            try:
                self.refused(path, says)
            except (AssertionError, subprocess.TimeoutExpired) as e:
                return "%s: %s" % (name, e)
            return None

        self.assertEqual([e for e in in_parallel(one, cases) if e], [])

    def test_not_a_file(self):
        pipe = self.path("pipe")
        os.mkfifo(pipe)
        for path, says in ((self.path("none.gguf"), "cannot be opened .No such file"),
                           (self.folder.name, "is a directory; expected a GGUF model file"),
                           (pipe, "is not a regular file"), ("/dev/zero", "is not a regular file")):
            with self.subTest(path):
                self.assertRegex(self.probe(path), says)

    @unittest.skipUnless(PROGRAM, "no program")
    def test_not_a_file_program(self):
        pipe = self.path("pipe")
        os.mkfifo(pipe)
        for path, says in ((self.path("none.gguf"), "no such file|cannot be opened"),
                           (self.folder.name, "is a (directory|folder)"), (pipe, "is not a regular file")):
            with self.subTest(path):
                self.refused(path, says)

    @unittest.skipUnless(PROGRAM, "no program")
    def test_other_verbs(self):
        path = self.path("cut.gguf")
        with open(path, "wb") as f:
            f.write(tiny_llama().bytes()[:-1])
        text = self.path("text.txt")
        with open(text, "w") as f:
            f.write("hello " * 200)
        for verb in (["inspect", "-m", path], ["compare", "-m", path, "-f", text, "--cache", "f16"]):
            self.refused(path, "but the file ends at", command=[PROGRAM] + verb)


class Sweeps(Folder):
    """Every shorter file and thousands of changed bytes, in one process; then some of them through the program."""

    def small(self, name, vocab):
        g = tiny_llama(vocab=vocab)
        for t in g.tensors:  # few bytes, so that every length can be tried
            t.dims, t.data, t.nbytes = [4], bytes(16), 16
        g.pad_last = False
        return g.write(self.path(name)), len(g.header())

    def test_check(self):
        for name, vocab in (("bpe.gguf", bpe_vocab), ("spm.gguf", spm_vocab)):
            path, header = self.small(name, vocab)
            done = call([PROBE, "sweep", path, str(header)], gib=1)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertGreater(int(done.stdout.split()[1]), header)  # of about 4 changes a byte, more than 1 is seen

    @unittest.skipUnless(PROGRAM, "no program")
    def test_program(self):
        g = tiny_llama()
        data, header = g.bytes(), len(g.header())
        tasks = [("cut", n, data[:n]) for n in range(0, header, header // 12)]
        tasks += [("cut", n, data[:n]) for n in range(header, len(data) - 32, len(data) // 12)]
        # A changed byte anywhere in the metadata; those that the check lets through reach libllama.
        for i in range(60):
            at = (i * 7919 + 13) % header
            tasks.append(("flip", at, data[:at] + bytes([data[at] ^ (1, 0x80, 0xFF)[i % 3]]) + data[at + 1:]))

        def one(task):
            kind, at, changed = task
            path = self.path("%s-%d.gguf" % (kind, at))
            with open(path, "wb") as f:
                f.write(changed)
            try:
                if kind == "cut":
                    self.refused(path, "is empty|ends inside|but the file ends at|allow at most|allowed are at most")
                else:
                    done = run_model(path)
                    self.assertIn(done.returncode, range(0, 126), done.stderr)
                    if done.returncode:
                        self.assertEqual(len(re.findall(r"^kvmosaic: error: .", done.stderr, re.M)), 1, done.stderr)
            except (AssertionError, subprocess.TimeoutExpired) as e:
                return "%s at %d: %s" % (kind, at, e)
            return None

        self.assertEqual([e for e in in_parallel(one, tasks) if e], [])


class Legal(Folder):
    """Unusual but right. All of these hold the same weights, so all must generate the same text."""

    def variants(self):
        for a in (8, 16, 32, 64, 4096):
            for extra in range(0, min(a, 32), 5):  # moves the end of the metadata over residues
                g = tiny_llama().align(a)
                g.set("general.name", STR, "x" * extra)
                yield "alignment %d, %d more bytes" % (a, extra), g
        g = tiny_llama()
        g.pad_last = False
        yield "J5 last tensor not padded", g
        g = tiny_llama()
        g.trailing = b"\xa5" * 1001
        yield "J5 trailing bytes", g
        g = tiny_llama()
        g.version = 2
        yield "version 2", g
        yield "keys of every type", all_types(tiny_llama())
        g = tiny_llama()
        g.set("split.no", U16, 0).set("split.count", U16, 1).set("split.tensors.count", I32, len(g.tensors))
        yield "J8 single-00001-of-00001", g

    def test_check(self):
        for name, g in self.variants():
            with self.subTest(name):
                path = g.write(self.path(name + ".gguf"))
                aligned = all(t % 32 == 0 for t in tensor_places(g))
                self.assertEqual(self.probe(path), "ok %d 1" % aligned)

    @unittest.skipUnless(PROGRAM, "no program")
    def test_program(self):
        paths = [g.write(self.path(name + ".gguf")) for name, g in self.variants()]
        texts = in_parallel(self.text, paths)
        self.assertEqual({t: p for t, p in zip(texts, paths)}, {texts[0]: paths[-1]})

    @unittest.skipUnless(PROGRAM, "no program")
    def test_i3_tied_output(self):
        tied = self.text(tiny_llama().write(self.path("tied.gguf")))
        g = tiny_llama(tied=False)
        g.tensor("output.weight").data = g.tensor("token_embd.weight").data
        # The random stream differs between tied and not, so the other weights are copied too.
        for t in tiny_llama().tensors:
            g.tensor(t.name).data = t.data
        self.assertEqual(self.text(g.write(self.path("equal.gguf"))), tied)
        negative = array.array("f", g.tensor("token_embd.weight").data)
        g.tensor("output.weight").data = array.array("f", (-x for x in negative)).tobytes()
        self.assertNotEqual(self.text(g.write(self.path("different.gguf"))), tied)

    @unittest.skipUnless(PROGRAM, "no program")
    def test_unused_special_ids(self):
        # Models in circulation have a padding id one past the vocabulary; nothing here ever reads it.
        g = tiny_llama().set("tokenizer.ggml.padding_token_id", U32, 271)
        self.text(g.write(self.path("padding.gguf")))


def tensor_places(g):
    at = len(g.header()) + g.pad(len(g.header()))
    for t in g.tensors:
        yield at
        at += len(t.data) + g.pad(len(t.data))


def all_types(g):
    for kind, value in ((0, 200), (1, -5), (2, 60000), (3, -5), (5, -5), (7, True), (10, 2**63), (11, -2**62),
                        (12, 0.5), (STR, "z\u00e9ro\0byte"), (ARR, (STR, [])), (ARR, (F32, [1.5, 2.5])),
                        (ARR, (0, [1] * 7))):
        g.kv.append(("zz.%d.%d" % (kind, len(g.kv)), kind, value))
    return g


class Large(Folder):
    """J7: tensors beyond 2 and 4 GiB and one of more than 2^31 bytes, in a file with holes."""

    def build(self):
        g, n, ff = tiny_llama(), 512, 65 * 256
        g.set("llama.expert_count", U32, n).set("llama.expert_used_count", U32, 1)
        g.set("llama.feed_forward_length", U32, ff)
        router = Tensor("blk.0.ffn_gate_inp.weight", [64, n], random_floats(random.Random(5), 64 * n))
        rest = {t.name: t for t in g.tensors}
        big = 64 * ff * n * 4
        self.assertGreater(big, 2**31)
        wide = [Tensor("blk.0.ffn_%s_exps.weight" % k, [64, ff, n], b"", nbytes=big) for k in ("gate", "up")]
        # IQ1_S: 50 bytes for 256 values. Zeros are zeros in every type.
        down = Tensor("blk.0.ffn_down_exps.weight", [ff, 64, n], b"", kind=19, nbytes=64 * ff * n // 256 * 50)
        g.tensors = [rest["token_embd.weight"], wide[0], rest["blk.0.attn_q.weight"], rest["blk.0.attn_k.weight"],
                     wide[1], down, router, rest["output_norm.weight"], rest["blk.0.attn_norm.weight"],
                     rest["blk.0.attn_v.weight"], rest["blk.0.attn_output.weight"], rest["blk.0.ffn_norm.weight"]]
        return g

    def test_check(self):
        path = self.build().write_sparse(self.path("large.gguf"))
        self.assertGreater(os.path.getsize(path), 2**32)
        self.assertEqual(self.probe(path), "ok 1 1")
        os.truncate(path, 2**32 + 5)
        self.assertRegex(self.probe(path), r"needs bytes \d{10} to \d{10}, but the file ends at 4294967301")

    @unittest.skipUnless(PROGRAM, "no program")
    def test_program(self):
        with open("/proc/meminfo") as f:
            free = int(re.search(r"MemAvailable:\s+(\d+)", f.read()).group(1)) >> 20
        if free < 8:
            self.skipTest("libllama touches all of the 4.4 GiB; %d GiB of memory are free" % free)
        # With all expert weights zero the layer adds nothing, as does one of ordinary width.
        small = tiny_llama()
        for k in ("gate", "up", "down"):
            t = small.tensor("blk.0.ffn_%s.weight" % k)
            t.data = bytes(len(t.data))
        expected = self.text(small.write(self.path("small.gguf")), 2)
        large = self.build().write_sparse(self.path("large.gguf"))
        self.assertEqual(self.text(large, 2, gib=16), expected)


class Split(Folder):
    """J8: three shards; numbers in the file count from 0, in the name from 1."""

    def shards(self, spoil=None):
        whole = tiny_llama()
        groups = [whole.tensors[:4], whole.tensors[4:8], whole.tensors[8:]]
        out = []
        for no, tensors in enumerate(groups):
            g = whole if no == 0 else Gguf()
            g.tensors = tensors
            g.set("split.no", U16, no).set("split.count", U16, 3)
            g.set("split.tensors.count", I32, sum(map(len, groups)))
            out.append(g)
        names = [0, 1, 2]
        if spoil:
            names = spoil(out) or names
        for g, n in zip(out, names):
            if n is not None:
                g.write(self.shard(n))
        return self.shard(0)

    def shard(self, no):
        return self.path("model-%05d-of-00003.gguf" % (no + 1))

    def both(self, path, says, named):
        self.assertRegex(self.probe(path), says)
        self.assertIn(named, self.probe(path))
        if PROGRAM:
            self.refused(path, says, named=named)

    def test_complete(self):
        path = self.shards()
        self.assertEqual(self.probe(path), "ok 1 3")
        if PROGRAM:
            self.assertEqual(self.text(path), self.text(tiny_llama().write(self.path("whole.gguf"))))

    def test_opened_by_second(self):
        self.shards()
        self.both(self.shard(1), "is shard 2 of 3; open the first one", self.shard(0))

    def test_missing(self):
        path = self.shards(lambda g: [0, None, 2])
        self.both(path, r"cannot be opened .*\(shard 2 of 3 of the model\)", self.shard(1))

    def test_swapped(self):
        path = self.shards(lambda g: [0, 2, 1])
        self.both(path, "split.no is 2, but by its name it is shard 2 of 3; allowed is 1", self.shard(1))

    def test_first_is_another(self):
        path = self.shards(lambda g: [1, 0, 2])
        self.both(path, "its name must then end in NAME-00002-of-00003.gguf", path)

    def test_renamed(self):
        path = self.path("renamed.gguf")
        os.rename(self.shards(), path)
        self.both(path, "its name must then end in NAME-00001-of-00003.gguf", path)

    def test_counts_disagree(self):
        path = self.shards(lambda g: g[2].set("split.count", U16, 4) and None)
        self.both(path, "split.count is 4; the first shard allows 3", self.shard(2))

    def test_tensor_count(self):
        path = self.shards(lambda g: g[0].set("split.tensors.count", I32, 12) and None)
        self.both(path, "split.tensors.count is 12, but its 3 shards hold 11 tensors", path)

    def test_tensor_twice(self):
        path = self.shards(lambda g: g[2].tensors.__setitem__(0, g[1].tensors[0]))
        self.both(path, "tensor '.*' is also in an earlier shard", self.shard(2))

    def test_shard_truncated(self):
        path = self.shards()
        os.truncate(self.shard(2), os.path.getsize(self.shard(2)) - 40)
        self.both(path, r"but the file ends at \d+.*\(shard 3 of 3 of the model\)", self.shard(2))

    def test_wrong_types(self):
        path = self.shards(lambda g: g[1].set("split.no", U32, 1) and None)
        self.both(path, "split.no has type u32; allowed is u16", self.shard(1))


class Tokenizers(Folder):
    """K2. The reference is the byte-pair encoder in gguf_tokens_reference.py, which shares no code with libllama."""

    PRE = ["default", "gpt-2", "llama-bpe", "deepseek-llm", "deepseek-coder", "deepseek-v3", "falcon", "mpt",
           "starcoder", "phi-2", "refact", "command-r", "qwen2", "stablelm2", "olmo", "dbrx", "smaug-bpe",
           "chatglm-bpe", "viking", "tekken", "smollm", "codeshell", "bloom", "exaone", "minerva-7b", "gpt-4o",
           "superbpe", "seed-coder", "hunyuan"]

    def ask(self, model, texts):
        done = call([TOKENS, model], gib=4, stdin="".join(t.encode().hex() + "\n" for t in texts))
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.split("\n")
        ids = [[int(i) for i in line.split()] for line in lines[0:2 * len(texts):2]]
        back = [bytes.fromhex(line) for line in lines[1:2 * len(texts):2]]
        return ids, back

    @unittest.skipUnless(TOKENS, "no libllama")
    def test_reference(self):
        for name in ("tiny", "small"):
            model = os.path.join(MODELS, name + ".gguf")
            if not os.path.exists(model):
                self.skipTest(model + " is not there")
            encoder = reference.Encoder(model)
            self.assertIn(encoder.pre, reference.SPLITS)
            ids, back = self.ask(model, reference.TEXTS)
            for text, got, bytes_back in zip(reference.TEXTS, ids, back):
                with self.subTest(model=name, text=text):
                    self.assertEqual(got, encoder.encode(text))
                    self.assertEqual(bytes_back, text.encode())

    @unittest.skipUnless(TOKENS, "no libllama")
    def test_round_trip_over_names(self):
        # All 256 bytes are in the vocabulary, so whatever the split, nothing may be lost or added.
        for pre in self.PRE:
            with self.subTest(pre):
                model = tiny_llama(vocab=lambda g, p=pre: bpe_vocab(g, p)).write(self.path(pre + ".gguf"))
                ids, back = self.ask(model, reference.TEXTS)
                self.assertEqual(back, [t.encode() for t in reference.TEXTS])
                self.assertTrue(all(ids))

    @unittest.skipUnless(PROGRAM, "no program")
    def test_missing_name_is_said_aloud(self):
        g = tiny_llama(vocab=bpe_vocab).drop("tokenizer.ggml.pre")
        path = g.write(self.path("no-pre.gguf"))
        self.assertIn("has no tokenizer.ggml.pre, so text is split by a default rule", self.probe(path))
        done = run_model(path)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("has no tokenizer.ggml.pre, so text is split by a default rule", done.stderr)


class RealModels(Folder):
    def test_accepted(self):
        found = [f for f in sorted(os.listdir(MODELS)) if f.endswith(".gguf")] if os.path.isdir(MODELS) else []
        if not found:
            self.skipTest("no models in " + MODELS)
        for name in found:
            self.assertRegex(self.probe(os.path.join(MODELS, name)), "^ok [01] 1$")


if __name__ == "__main__":
    if not PROBE:
        raise SystemExit("gguf_cases.py: KVMOSAIC_GGUF_PROBE is not set; run it through ctest")
    unittest.main()
