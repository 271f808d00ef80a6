#!/usr/bin/env python3
"""run and compare on the real model. See support.py."""
import json
import os
import re

from support import Case, SAMPLE, TINY, main, sample

SUMMARY = re.compile(
    r"^\[(?P<spec>\S+)\] (?P<tokens>\d+) tokens at (?P<speed>[\d.]+) tok/s \(prompt (?P<prompt>\d+) at [\d.]+\) \| "
    r"cache (?P<mib>[\d.]+) MiB, (?P<bits>[\d.]+) true bits per value, (?P<times>[\d.]+)x smaller than 16 bit "
    r"\((?P<packed>\d+) of (?P<rows>\d+) tokens packed\) \| (?P<path>\w+) path \((?P<isa>\w+)\)(?P<sharing>.*)$", re.M)


class Run(Case):
    def run_tiny(self, *words, **more):
        result = self.good("run", "-m", "tiny", *words, **more)
        found = SUMMARY.findall(result.err)
        self.assertEqual(len(found), 1, "exactly one summary line\n" + result.err)
        return result, SUMMARY.search(result.err)

    def test_text_and_summary_of_every_kind_of_cache(self):
        for spec in ("f16", "kivi:bits=2", "mixkvq"):
            result, line = self.run_tiny("-p", "The capital of France is", "--raw", "-n", 8, "--temp", 0, "--cache", spec)
            self.assertGreater(len(result.out.strip()), 10)
            self.assertEqual(line["spec"], spec)
            self.assertEqual(line["tokens"], "8")
            self.assertGreater(float(line["speed"]), 0)
            # Nothing is packed yet, so honest bits stand at 16 or above, whatever the spec promises.
            self.assertGreaterEqual(float(line["bits"]), 16)
            self.assertEqual(line["packed"], "0")

    def test_raw_windows_are_exact(self):
        words = ["-p", "Once upon a time", "--raw", "-n", 12, "--temp", 0, "--cache"]
        self.assertEqual(self.run_tiny(*words, "f16")[0].out, self.run_tiny(*words, "kivi:bits=2")[0].out)

    def test_l2_the_path_is_said_and_can_be_demanded(self):
        text = self.path("long.txt", sample(1200)) # some 390 tokens
        for spec in ("kivi:bits=2", "mixkvq"):
            words = ["-f", text, "--raw", "-n", 4, "--cache", spec]
            _, line = self.run_tiny(*words)
            self.assertGreaterEqual(int(line["packed"]), 128)
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
        words = ["-p", "Tell me about", "--raw", "-n", 12, "--temp", 1.5, "--seed"]
        first, again, other = (self.run_tiny(*words, seed)[0].out for seed in (7, 7, 8))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_samples_begin_from_one_prompt(self):
        words = ["-p", sample(700), "--raw", "-n", 16, "--temp", 0, "--cache", "kivi:bits=4"]
        alone = self.run_tiny(*words, "--json", "-")[0].json()
        result, line = self.run_tiny(*words, "--samples", 3, "--json", "-", "--against-separate")
        got = result.json()
        self.assertEqual(len(got["samples"]), 3)
        self.assertEqual(len(set(got["samples"])), 1)  # greedy: one text
        self.assertEqual(got["samples"][0][:20], alone["text"][:20])
        self.assertEqual(got["tokens"], 48)
        self.assertEqual(got["cache_tokens"], alone["cache_tokens"])
        self.assertLess(got["cache_bytes"], 2.9 * alone["cache_bytes"])  # of so short a text most rows are raw, and copied
        self.assertEqual(line["sharing"], " | 3 samples share %d tokens" % alone["prompt_tokens"])
        self.assertRegex(result.err, r"3 samples together: 48 tokens .* one after the other: 48 tokens .*x")
        warm = self.run_tiny("-p", "Tell me about", "--raw", "-n", 12, "--temp", 1.5, "--samples", 3, "--json", "-")
        self.assertEqual(len(set(warm[0].json()["samples"])), 3)
        self.refused(2, "samples", "run", "-m", "tiny", "--chat", "--samples", 2)
        self.refused(2, "-n", "run", "-m", "tiny", "-p", "x", "--samples", 2, "-n", -1)
        self.refused(2, "--samples", "run", "-m", "tiny", "-p", "x", "--against-separate")

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
        words = ["--weights", "as-is", "--tokens", 200, "--cache", "kivi:bits=2,residual=32"]
        small, large = (self.compare(*words, "--ubatch", n)["rows"] for n in (50, 200))
        self.assertAlmostEqual(small[2]["cache_bytes"] / large[2]["cache_bytes"], 1, delta=0.002)
        self.assertAlmostEqual(small[2]["kl_mean"] / large[2]["kl_mean"], 1, delta=0.15)
        # In chunk steps a window that is one chunk never looks at a code: such a pass would flatter any cache.
        chunk = self.compare(*words, "--ubatch", 200, "--step", "chunk")["rows"]
        self.assertLess(chunk[2]["kl_mean"], 0.1 * large[2]["kl_mean"])

    def test_table_and_warning_of_the_floor(self):
        done = self.good("compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--tokens", 128, "--cache", "bf16")
        self.assertRegex(done.out, r"(?m)^cache +bits")
        self.assertRegex(done.out, r"(?m)^floor \(f16 against f32\)")
        self.assertRegex(done.out, r"(?m)^bf16 ")
        self.assertRegex(done.err, "warning: the floor .* tenth")

    def test_impossible_windows(self):
        words = ["compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--cache", "mixkvq"]
        self.refused(2, "window 9000.*8192", *words, "--window", 9000)
        self.refused(2, "204800 tokens.*sample.txt has", *words, "--windows", 100)
        self.refused(2, "score-from 512.*1 to 511", *words, "--window", 512, "--score-from", 512)
        self.refused(2, "windows 0", *words, "--windows", 0)
        self.refused(2, "exclude", *words, "--windows", 2, "--tokens", 100)

    def test_several_texts_have_windows_of_their_own(self):
        questions = self.path("q.jsonl", "".join('{"question": "What is %d and %d?", "answer": "It is %d."}\n' %
                                                 (i, i, 2 * i) for i in range(40)))
        words = ["compare", "-m", "tiny", "--weights", "as-is", "--window", 96, "--cache", "kivi:bits=4"]
        got = self.good(*words, "-f", SAMPLE + ":2", "-f", questions + ":1", "--json", "-").json()
        self.assertEqual([(t["text"], t["windows"]) for t in got["texts"]], [(SAMPLE, 2), (questions, 1)])
        self.assertEqual(got["windows"], 3)
        for row in got["rows"]:
            self.assertEqual(row["tokens"], 3 * 48)
        f16, floor, kivi = got["rows"]
        self.assertEqual((f16["ppl_ratio"], floor["ppl_ratio"]), (1, None))
        self.assertAlmostEqual(kivi["ppl_ratio"], kivi["ppl"] / f16["ppl"], places=6)
        self.assertLess(kivi["true_bits_8k"], kivi["true_bits_2k"])
        self.assertLess(kivi["true_bits_2k"], 6) # although nothing of 96 tokens is packed
        self.assertGreaterEqual(kivi["true_bits"], 16)
        alone = self.good(*words, "-f", questions, "--windows", 1, "--json", "-").json()
        self.assertEqual(alone["texts"][0]["sha256"], got["texts"][1]["sha256"])
        again = self.good(*words, "-f", SAMPLE, "--windows", 2, "-f", questions, "--windows", 1)
        self.assertIn("2 windows of %s, 1 window of %s" % (SAMPLE, questions), again.out)
        self.refused(2, "windows is given 3 times for 2 texts", *words, "-f", SAMPLE, "-f", questions, "--windows", 1,
                     "--windows", 2, "--windows", 3)
        self.refused(2, "not both", *words, "-f", SAMPLE + ":2", "--windows", 1)
        self.refused(2, "one text", *words, "-f", SAMPLE, "-f", questions, "--tokens", 100)
        self.refused(2, "line 1.*'answer'", *words, "-f", self.path("bad.jsonl", '{"question": "q"}'))

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


if __name__ == "__main__":
    raise SystemExit(main(Run, Compare, Resume))
