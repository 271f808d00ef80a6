#!/usr/bin/env python3
"""The real kvmosaic program on a real model: one process a case, what a user types and sees.

usage: test_cli.py [CLASS ...]; needs KVMOSAIC_PROGRAM and KVMOSAIC_SOURCE_DIR. Exit code 77: nothing could run because
the model is not fetched.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = os.environ.get("KVMOSAIC_PROGRAM", "")
SOURCE = os.environ.get("KVMOSAIC_SOURCE_DIR", "")
CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvmosaic")
TINY = os.path.join(CACHE, "models", "tiny.gguf")
SAMPLE = os.path.join(SOURCE, "data", "sample.txt")
SUMMARY = re.compile(
    r"^\[(?P<spec>\S+)\] (?P<tokens>\d+) tokens at (?P<speed>[\d.]+) tok/s \(prompt (?P<prompt>\d+) at [\d.]+\) \| "
    r"cache (?P<mib>[\d.]+) MiB, (?P<bits>[\d.]+) true bits per value, (?P<times>[\d.]+)x smaller than 16 bit "
    r"\((?P<packed>\d+) of (?P<rows>\d+) tokens packed\) \| (?P<path>\w+) path \((?P<isa>\w+)\)$", re.M)


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def json(self):
        return json.loads(self.out)


def call(*words, stdin="", env=None, program=None):
    done = subprocess.run([program or PROGRAM, *map(str, words)], input=stdin, capture_output=True, text=True,
                          timeout=280, env=dict(os.environ, **(env or {})), errors="replace")
    return Result(done)


class Case(unittest.TestCase):
    needs_model = True

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="kvmosaic-cli-")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def path(self, name, text=None):
        path = os.path.join(self.folder, name)
        if text is not None:
            with open(path, "w") as file:
                file.write(text)
        return path

    def good(self, *words, **more):
        result = call(*words, **more)
        self.assertEqual(result.code, 0, "%s\n%s" % (words, result.err))
        return result

    def refused(self, code, pattern, *words, **more):
        """One sentence on stderr that says `pattern`, nothing on stdout, and the exit code."""
        result = call(*words, **more)
        self.assertEqual(result.code, code, "%s\n%s" % (words, result.err))
        self.assertEqual(result.out, "")
        lines = result.err.strip().splitlines()
        self.assertEqual(len(lines), 1, result.err)
        self.assertTrue(lines[0].startswith("kvmosaic: error: "), lines[0])
        self.assertRegex(lines[0], pattern)


def sample(characters):
    with open(SAMPLE) as file:
        return file.read(characters)


class Usage(Case):
    needs_model = False

    def test_help_and_version(self):
        self.assertRegex(self.good("--version").out, r"^kvmosaic \d+\.\d+\.\d+\n$")
        top = self.good("--help").out
        for verb in ["run", "compare", "inspect", "methods", "fetch", "serve", "devices"]:
            self.assertIn(verb, top)
            self.assertIn("Examples\n  kvmosaic %s" % verb, self.good(verb, "--help").out)

    def test_bad_usage_is_one_sentence_and_code_2(self):
        self.refused(2, "subcommand", )
        self.refused(2, "juggle.*run, compare", "juggle")
        self.refused(2, "--colour", "run", "-m", "tiny", "-p", "x", "--colour")
        self.refused(2, "-m|--model", "run", "-p", "x")
        self.refused(2, "-p TEXT or -f FILE", "run", "-m", "tiny")
        self.refused(2, "-p and -f", "run", "-m", "tiny", "-p", "x", "-f", SAMPLE)
        self.refused(2, "temp", "run", "-m", "tiny", "-p", "x", "--temp", "-3")
        self.refused(2, "f16", "compare", "-m", "tiny", "-f", SAMPLE, "--cache", "mixkvq", "--weights", "q4")
        self.refused(2, "decode", "compare", "-m", "tiny", "-f", SAMPLE, "--cache", "mixkvq", "--step", "leap")

    def test_specs_are_refused_before_any_model_is_looked_at(self):
        for verb in (["run", "-p", "x"], ["compare", "-f", SAMPLE], ["inspect"], ["serve"]):
            self.refused(2, "kivi", verb[0], "-m", "nowhere.gguf", *verb[1:], "--cache", "kivy:bits=2")
        self.refused(2, "bits.*1, 2, 3.*5", "run", "-m", "nowhere.gguf", "-p", "x", "--cache", "kivi:bits=5")
        self.refused(2, "colour", "run", "-m", "nowhere.gguf", "-p", "x", "--cache", "kivi:colour=2")
        self.refused(2, "twice", "compare", "-m", "nowhere.gguf", "-f", SAMPLE, "--cache", "mixkvq", "--cache", "mixkvq")

    def test_files_that_are_no_model(self):
        self.refused(1, "nowhere.gguf.*tiny", "run", "-m", "nowhere.gguf", "-p", "x")
        self.refused(2, "folder", "run", "-m", self.folder, "-p", "x")
        self.refused(1, "words.gguf", "run", "-m", self.path("words.gguf", "not a model at all"), "-p", "x")
        self.refused(1, "empty.gguf", "run", "-m", self.path("empty.gguf", ""), "-p", "x")

    def test_texts_that_cannot_be_read(self):
        self.refused(1, "missing.txt", "run", "-m", "nowhere.gguf", "-f", self.path("missing.txt"))
        self.refused(2, "empty", "run", "-m", "nowhere.gguf", "-f", self.path("empty.txt", ""))
        self.refused(2, "folder", "run", "-m", "nowhere.gguf", "-f", self.folder)

    def test_a_name_that_is_not_fetched_says_how_to(self):
        self.refused(1, "kvmosaic fetch tiny", "run", "-m", "tiny", "-p", "x", env={"XDG_CACHE_HOME": self.folder})

    def test_fetch(self):
        self.refused(2, "tiny, small", "fetch", "huge")
        names = [entry["name"] for entry in self.good("fetch", "--list", "--json").json()]
        self.assertIn("tiny", names)

    def test_serve_without_a_server_says_the_command_that_builds_it(self):
        alone = os.path.join(self.folder, "kvmosaic")
        shutil.copy(PROGRAM, alone)
        model = self.path("some.gguf", "x")
        self.refused(1, "make server", "serve", "-m", model, program=alone)

    def test_serve_hands_over_spec_and_options(self):
        alone = os.path.join(self.folder, "kvmosaic")
        shutil.copy(PROGRAM, alone)
        fake = self.path("llama-server", "#!/bin/sh\necho \"$KVMOSAIC_CACHE\" \"$@\"\n")
        os.chmod(fake, 0o755)
        model = self.path("some.gguf", "x")
        done = self.good("serve", "-m", model, "--cache", "kivi:bits=2,group=32", "--ctx", "512", "-np", "3", program=alone)
        os.remove(fake)
        self.assertEqual(done.out.split()[0], "kivi:bits=2,group=32")
        for words in ("-m " + model, "-c 512", "-np 3", "--port 8080"):
            self.assertIn(words, done.out)

    def test_devices(self):
        device = self.good("devices", "--json").json()["devices"][0]
        self.assertIn(device["isa"], device["isas"])
        self.assertGreater(device["memory_bytes"], 1 << 20)
        forced = self.good("devices", "--json", env={"KVMOSAIC_ISA": device["isas"][0]}).json()["devices"][0]
        self.assertEqual(forced["isa"], device["isas"][0])
        self.refused(1, "abacus", "devices", env={"KVMOSAIC_ISA": "abacus"})


class Methods(Case):
    needs_model = False

    def test_every_method_is_listed_with_its_options(self):
        methods = self.good("methods", "--json").json()["methods"]
        names = [m["method"] for m in methods]
        self.assertTrue({"f16", "kivi", "mixkvq"} <= set(names), names)
        table = self.good("methods").out
        for method in methods:
            self.assertTrue(method["summary"] and method["paper"])
            for option in method["options"]:
                self.assertTrue(option["help"], option)
                self.assertIn("%s=%s" % (option["name"], option["default"]), table)
                if "choices" in option:
                    self.assertIn(option["default"], option["choices"])
        one = self.good("methods", "mixkvq").out
        self.assertIn("hi=12", one)
        self.assertNotIn("kivi", one)
        self.refused(2, "mixkvq", "methods", "mixkv")

    def test_every_default_can_be_spelled_out(self):
        for method in self.good("methods", "--json").json()["methods"]:
            options = ",".join("%s=%s" % (o["name"], o["default"]) for o in method["options"])
            spec = method["method"] + (":" + options if options else "")
            sides = self.good("inspect", "--cache", spec, "--head-dim", 64, "--json").json()["sides"]
            plain = self.good("inspect", "--cache", method["method"], "--head-dim", 64, "--json").json()["sides"]
            self.assertEqual(sides, plain)


class Inspect(Case):
    def test_parts_cover_the_page_without_gaps(self):
        specs = ["f16", "f32", "kivi:bits=2", "kivi:bits=3,group=64", "mixkvq"]
        for spec in specs:
            for dim in (64, 80, 128, 256):
                for side in self.good("inspect", "--cache", spec, "--head-dim", dim, "--json").json()["sides"]:
                    at = 0
                    for part in side["parts"]:
                        self.assertEqual(part["offset"], at, (spec, dim, part))
                        at += part["bytes"]
                    self.assertEqual(at, side["bytes"])
                    self.assertAlmostEqual(side["true_bits"], 8 * at / (side["tokens"] * dim))

    def test_a_ladder_is_drawn(self):
        text = self.good("inspect", "--cache", "mixkvq", "--head-dim", 128, "--ladder", "16:12,4:44,2:72", "--side", "k").out
        self.assertIn("raw channels [12][128 tokens] f16", text)
        self.assertIn("44 channels", text)
        self.refused(2, "ladder|channels", "inspect", "--cache", "mixkvq", "--head-dim", 128, "--ladder", "16:12,4:44",
                     "--side", "k")
        self.refused(2, "--ladder", "inspect", "--cache", "mixkvq", "--head-dim", 128, "--ladder", "many")

    def test_bad_usage(self):
        self.refused(2, "--head-dim", "inspect")
        self.refused(2, "513|512", "inspect", "--head-dim", 513)
        self.refused(2, "exclude", "inspect", "-m", "tiny", "--head-dim", 64)
        self.refused(2, "--layer 99.*29", "inspect", "-m", "tiny", "--layer", 99)

    def test_plans_of_a_real_text(self):
        words = ["inspect", "-m", "tiny", "-f", SAMPLE, "--ctx", 400, "--cache", "mixkvq"]
        everything = self.good(*words, "--json").json()
        self.assertEqual(everything["tokens"], 400)
        self.assertEqual(len(everything["layers"]), 30)
        self.assertEqual(len(everything["plans"]), 30 * 3 * 2)
        self.assertEqual(everything["layers"][0]["rope"]["rotary"], 64)
        packed = 0
        for plan in everything["plans"]:
            self.assertEqual(plan["front"] + plan["packed"] + plan["recent"], everything["tokens"])
            self.assertLess(plan["recent"], plan["window_keep"] + plan["window_flush"])
            packed += plan["packed"]
            if plan["side"] == "key":
                for page in plan["pages"]:
                    channels = [int(step.split(":")[1]) for step in page["ladder"].split()]
                    self.assertEqual(sum(channels), 64, page)
        self.assertGreater(packed, 0)
        head = self.good(*words, "--layer", 3, "--head", 1, "--side", "k").out
        self.assertIn("layer 3, KV head 1", head)
        self.assertIn("channel map [64]", head)


class Run(Case):
    def run_tiny(self, *words, **more):
        result = self.good("run", "-m", "tiny", *words, **more)
        found = SUMMARY.findall(result.err)
        self.assertEqual(len(found), 1, "exactly one summary line\n" + result.err)
        return result, SUMMARY.search(result.err)

    def test_text_and_summary_of_every_kind_of_cache(self):
        for spec in ("f16", "kivi:bits=2", "mixkvq"):
            result, line = self.run_tiny("-p", "The capital of France is", "--raw", "-n", 12, "--temp", 0, "--cache", spec)
            self.assertGreater(len(result.out.strip()), 10)
            self.assertEqual(line["spec"], spec)
            self.assertEqual(line["tokens"], "12")
            self.assertGreater(float(line["speed"]), 0)
            # Nothing is packed yet, so honest bits stand at 16 or above, whatever the spec promises.
            self.assertGreaterEqual(float(line["bits"]), 16)
            self.assertEqual(line["packed"], "0")

    def test_raw_windows_are_exact(self):
        words = ["-p", "Once upon a time", "--raw", "-n", 24, "--temp", 0, "--cache"]
        self.assertEqual(self.run_tiny(*words, "f16")[0].out, self.run_tiny(*words, "kivi:bits=2")[0].out)

    def test_l2_the_path_is_said_and_can_be_demanded(self):
        text = self.path("long.txt", sample(2400))
        for spec in ("kivi:bits=2", "mixkvq"):
            words = ["-f", text, "--raw", "-n", 4, "--cache", spec]
            _, line = self.run_tiny(*words)
            self.assertGreater(int(line["packed"]), 128)
            self.assertLess(float(line["bits"]), 16)
            self.assertGreater(float(line["times"]), 1)
            self.assertIn(line["path"], ("restore", "fused"))
            if line["path"] == "fused":
                self.run_tiny(*words, "--require-fused")
            else:
                self.refused(1, "require-fused.*%s.*restore" % re.escape(spec), "run", "-m", "tiny", *words,
                             "--require-fused")
        _, line = self.run_tiny("-f", text, "--raw", "-n", 4, "--cache", "f16", "--require-fused")
        self.assertEqual(line["path"], "raw")

    def test_d9_a_context_filled_exactly(self):
        def prompt(tokens):
            return " a" * tokens

        limit = 300 # no multiple of anything that rounds
        for tokens in (limit - 1, limit):
            out = self.good("run", "-m", "tiny", "--raw", "-p", prompt(tokens), "--ctx", limit, "-n", 50, "--temp", 0,
                            "--cache", "kivi:bits=4", "--json", "-")
            got = out.json()
            self.assertEqual(got["prompt_tokens"], tokens, "this test counts on one token a word")
            # The last token is predicted from a full context; it need not go in.
            self.assertEqual(got["tokens"], limit - tokens + 1)
            self.assertEqual(got["cache_tokens"], limit)
            self.assertEqual(got["stop"], "context")
            self.assertRegex(out.err, "context of 300 tokens is full")
        self.refused(1, "301 tokens.*300", "run", "-m", "tiny", "--raw", "-p", prompt(limit + 1), "--ctx", limit)
        self.refused(2, "9000.*8192|8192.*9000", "run", "-m", "tiny", "-p", "x", "--ctx", 9000)

    def test_seeds_repeat_a_text(self):
        words = ["-p", "Tell me about", "--raw", "-n", 24, "--temp", 1.5, "--seed"]
        first, again, other = (self.run_tiny(*words, seed)[0].out for seed in (7, 7, 8))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_template_is_the_models_own(self):
        words = ["run", "-m", "tiny", "-p", "Hello", "-n", 1, "--json", "-"]
        shaped, raw = self.good(*words).json(), self.good(*words, "--raw").json()
        # The model's template adds a system message of its own, which a generic one would not.
        self.assertGreater(shaped["prompt_tokens"], raw["prompt_tokens"] + 20)
        longer = self.good(*words, "--system", "Be brief. " * 20).json()
        self.assertGreater(longer["prompt_tokens"], shaped["prompt_tokens"])

    def test_an_answer_ends_where_the_model_ends(self):
        got = self.good("run", "-m", "tiny", "-p", "Say only the word yes.", "-n", 400, "--temp", 0, "--json", "-").json()
        self.assertEqual(got["stop"], "end")
        self.assertLess(got["tokens"], 400)
        self.assertNotIn("<|im_end|>", got["text"])

    def test_chat_over_a_pipe(self):
        result, line = self.run_tiny("--chat", "-n", 16, "--temp", 0, stdin="What is water?\n\nAnd ice?\n/exit\n")
        self.assertGreaterEqual(len([l for l in result.out.splitlines() if l.strip()]), 2)
        self.assertGreater(int(line["tokens"]), 16)

    def test_json_files_are_not_replaced(self):
        target = self.path("run.json", "mine")
        words = ["-m", "tiny", "-p", "x", "-n", 2, "--json", target]
        self.refused(2, "run.json.*--force", "run", *words)
        with open(target) as file:
            self.assertEqual(file.read(), "mine")
        self.good("run", *words, "--force")
        with open(target) as file:
            self.assertEqual(json.load(file)["spec"], "mixkvq")
        self.refused(2, "folder", "run", "-m", "tiny", "-p", "x", "--json", self.path("none/run.json"))

    def test_truncated_models(self):
        with open(TINY, "rb") as file:
            head = file.read(1 << 20)
        for name, size in (("header", 20), ("metadata", 200000), ("tensors", 1 << 20)):
            path = self.path(name + ".gguf")
            with open(path, "wb") as file:
                file.write(head[:size])
            self.refused(1, name + ".gguf", "run", "-m", path, "-p", "x")


class Compare(Case):
    FIELDS = {"spec", "tokens", "true_bits", "true_bits_k", "true_bits_v", "cache_bytes", "ppl", "kl_mean", "kl_p99",
              "top1", "prefill_tok_s", "path"}

    def compare(self, *words):
        return self.good("compare", "-m", "tiny", "-f", SAMPLE, "--json", "-", *words).json()

    def test_rows_schema_and_order_of_caches(self):
        result = self.compare("--window", 512, "--windows", 1, "--cache", "f16", "--cache", "kivi:bits=4,group=32",
                              "--cache", "kivi:bits=2,group=32", "--cache", "mixkvq")
        self.assertTrue({"model", "model_sha256", "text", "machine", "version", "rows"} <= set(result))
        self.assertEqual(result["weights"], "f16")
        self.assertEqual(len(result["model_sha256"]), 64)
        rows = {row["spec"]: row for row in result["rows"]}
        self.assertEqual([row["spec"] for row in result["rows"]],
                         ["f16", "floor", "kivi:bits=4,group=32", "kivi:bits=2,group=32", "mixkvq"])
        for row in rows.values():
            self.assertTrue(self.FIELDS <= set(row), row)
            self.assertEqual(row["tokens"], 512 - 256)
            self.assertTrue(1 < row["ppl"] < 1000, row)
            self.assertTrue(0 <= row["top1"] <= 1)
        self.assertEqual((rows["f16"]["kl_mean"], rows["f16"]["top1"]), (0, 1))
        self.assertTrue(0 < rows["floor"]["kl_mean"] < 3e-4, rows["floor"])
        four, two, mix = (rows[s] for s in ("kivi:bits=4,group=32", "kivi:bits=2,group=32", "mixkvq"))
        self.assertTrue(rows["floor"]["kl_mean"] < four["kl_mean"] < two["kl_mean"])
        self.assertLess(mix["kl_mean"], two["kl_mean"])
        for row in (four, two, mix):
            self.assertGreaterEqual(row["kl_p99"], row["kl_mean"])
            self.assertLess(row["cache_bytes"], rows["f16"]["cache_bytes"])
        self.assertLess(two["true_bits"], four["true_bits"])
        self.assertLess(four["true_bits"], rows["f16"]["true_bits"])
        self.assertGreaterEqual(rows["f16"]["true_bits"], 16)
        # KIVI keeps 128 values and at most 127 keys of 512 raw: bits can be said in advance, roughly.
        self.assertTrue(4 < two["true_bits"] < 8, two)

    def test_decode_semantics_do_not_depend_on_the_step(self):
        words = ["--weights", "as-is", "--tokens", 400, "--cache", "kivi:bits=2"]
        small, large = (self.compare(*words, "--ubatch", n)["rows"] for n in (50, 400))
        self.assertEqual(small[2]["cache_bytes"], large[2]["cache_bytes"])
        self.assertAlmostEqual(small[2]["kl_mean"] / large[2]["kl_mean"], 1, delta=0.15)
        # In chunk steps a window that is one chunk never looks at a code: such a pass would flatter any cache.
        chunk = self.compare(*words, "--ubatch", 400, "--step", "chunk")["rows"]
        self.assertLess(chunk[2]["kl_mean"], 0.1 * large[2]["kl_mean"])

    def test_table_and_warning_of_the_floor(self):
        done = self.good("compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--tokens", 256, "--cache", "bf16")
        self.assertRegex(done.out, r"(?m)^cache +bits")
        self.assertRegex(done.out, r"(?m)^floor \(f16 against f32\)")
        self.assertRegex(done.out, r"(?m)^bf16 ")
        self.assertRegex(done.err, "warning: the floor .* tenth")

    def test_impossible_windows(self):
        words = ["compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--cache", "mixkvq"]
        self.refused(2, "window 9000.*8192", *words, "--window", 9000)
        self.refused(2, "204800 tokens.*text has", *words, "--windows", 100)
        self.refused(2, "score-from 512.*1 to 511", *words, "--window", 512, "--score-from", 512)
        self.refused(2, "windows 0", *words, "--windows", 0)
        self.refused(2, "exclude", *words, "--windows", 2, "--tokens", 100)

    def test_results_are_not_replaced(self):
        target = self.path("results.json", "mine")
        self.refused(2, "results.json.*--force", "compare", "-m", "tiny", "-f", SAMPLE, "--cache", "mixkvq", "--json", target)
        with open(target) as file:
            self.assertEqual(file.read(), "mine")
        self.assertEqual(os.listdir(self.folder), ["results.json"])


class Resume(Case):
    def test_an_interrupted_comparison_goes_on(self):
        progress = self.path("progress")
        words = ["compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--cache", "kivi:bits=4"]
        other = [*words, "--window", 128]
        words += ["--window", 144]
        self.good(*words, "--windows", 1, "--resume", progress)
        with open(progress) as file:
            first = json.load(file)["rows"][0]["windows"][0]
        resumed = self.good(*words, "--windows", 2, "--resume", progress, "--json", "-").json()
        with open(progress) as file:
            self.assertEqual(json.load(file)["rows"][0]["windows"][0], first, "a finished window was computed again")
        whole = self.good(*words, "--windows", 2, "--json", "-").json()
        for a, b in zip(resumed["rows"], whole["rows"]):
            self.assertAlmostEqual(a["ppl"], b["ppl"], places=6)
            self.assertEqual(a["tokens"], b["tokens"])
        # A further cache joins the windows that are there.
        more = self.good(*words, "--cache", "kivi:bits=2", "--windows", 2, "--resume", progress, "--json", "-").json()
        self.assertEqual([row["tokens"] for row in more["rows"]], [144] * 4)
        self.refused(2, "window is 144 there, 128 here", *other, "--resume", progress)
        self.refused(2, "not the progress", *other, "--resume", self.path("other", "hello"))


def main():
    names = sys.argv[1:] or ["Usage", "Methods", "Inspect", "Run", "Compare", "Resume"]
    if not os.path.exists(PROGRAM) or not os.path.exists(SAMPLE):
        print("set KVMOSAIC_PROGRAM and KVMOSAIC_SOURCE_DIR")
        return 1
    suite, loader = unittest.TestSuite(), unittest.TestLoader()
    for name in names:
        case = globals()[name]
        if case.needs_model and not os.path.exists(TINY):
            print("skipped: %s needs the model 'tiny' (kvmosaic fetch tiny)" % name)
            return 77
        suite.addTests(loader.loadTestsFromTestCase(case))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    return 0 if result.wasSuccessful() and result.testsRun > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
