#!/usr/bin/env python3
"""Verbs of eval that let the real model answer freely. See support.py."""
import gzip
import json

from support import Case, SAMPLE, main

NO_DATA = {"KVMOSAIC_DATA": ""}


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def results(path):
    """Answers by what they are of, without the time they took."""
    out = {}
    for line in lines(path)[1:]:
        line.pop("seconds")
        out[line["spec"], line.get("pass"), line["item"]] = line
    return out


class Generate(Case):
    WORDS = ["eval", "generate", "-m", "tiny", "-f", SAMPLE, "--prompts", 3, "--prompt-tokens", 136, "--max-tokens", 12,
             "--cache", "kivi:bits=2"]

    def test_answers_do_not_depend_on_what_is_beside_them(self):
        whole, cut = self.path("whole.jsonl"), self.path("cut.jsonl")
        got = self.good(*self.WORDS, "--batch", 3, "--resume", whole, "--json", "-").json()
        want = results(whole)
        self.assertEqual(len(want), 2 * 2 * 3)
        # An interrupted run: two answers and half a line are there. It goes on with another batch.
        with open(whole) as file:
            text = file.read().splitlines(keepends=True)
        with open(cut, "w") as file:
            file.write("".join(text[:3]) + text[3][:40])
        self.good(*self.WORDS, "--batch", 1, "--resume", cut)
        self.assertEqual(results(cut), want)
        with open(cut) as file:
            self.assertEqual(file.read().splitlines(keepends=True)[:3], text[:3])

        # What a cache says to f16's own words is what it said freely until it left them, and there it flips.
        flips = positions = 0
        for item in range(3):
            said = want["f16", "free", item]["token_ids"]
            free, forced = (want["kivi:bits=2", kind, item]["token_ids"] for kind in ("free", "forced"))
            common = 0
            while common < min(len(said), len(free)) and said[common] == free[common]:
                common += 1
            until = free[:common + 1][:len(said)]  # shorter by one where it left by ending
            self.assertEqual(forced[:len(until)], until)
            self.assertEqual(want["f16", "forced", item]["token_ids"], said)
            flips += sum(a != b for a, b in zip(said, forced))
            positions += len(said)
            self.assertEqual(len(forced), len(said))
        f16, kivi = got["rows"]
        self.assertEqual((f16["flips"], f16["identical"]), (0, 1))
        self.assertAlmostEqual(kivi["flips"], flips / positions)
        self.assertEqual(kivi["flip_positions"], positions)
        self.assertGreater(flips, 0)
        self.assertGreater(f16["true_bits"], 16)
        self.assertLess(kivi["true_bits"], f16["true_bits"] - 2)
        self.assertEqual(len(got["results"]), len(want))


class Tasks(Case):
    def problems(self, name, count):
        text = "".join(json.dumps({"question": "Tom has %d pears and buys %d more. How many pears has he now?" % (n, n + 1),
                                   "answer": "He has %d + %d = <<%d>>%d pears.\n#### %d" %
                                             (n, n + 1, 2 * n + 1, 2 * n + 1, 2 * n + 1)}) + "\n"
                       for n in range(2, 2 + count))
        return self.path(name, text)

    def test_gsm8k(self):
        words = ["eval", "gsm8k", "-m", "tiny", "--file", self.problems("test.jsonl", 4), "--train",
                 self.problems("train.jsonl", 3), "--cache", "mixkvq", "--questions", 3, "--skip", 1, "--max-tokens", 24]
        keep = self.path("math.jsonl")
        got = self.good(*words, "--shots", 2, "--resume", keep, "--json", "-").json()
        self.assertEqual([r["item"] for r in got["results"]], [1, 2, 3] * 2)
        for r in got["results"]:
            self.assertEqual(r["gold"], str(2 * (r["item"] + 2) + 1))
            self.assertEqual(r["hit"], r["number"] == r["gold"])
            self.assertNotIn("Question:", r["answer"])
            self.assertIn("####", r["answer"])  # as the solved ones do
        f16, mixkvq = got["rows"]
        self.assertEqual(f16["hits"], sum(r["hit"] for r in got["results"][:3]))
        self.assertEqual((f16["agree"], f16["lost"], f16["won"], f16["p"]), (1, 0, 0, 1))
        self.assertTrue(mixkvq["accuracy_low"] <= mixkvq["accuracy"] <= mixkvq["accuracy_high"])
        self.assertEqual(lines(keep)[0]["match"], "number behind ####")
        # more questions go on from those that are there
        before = results(keep)
        words[words.index("--skip") + 1], words[words.index("--questions") + 1] = 0, 4
        self.good(*words, "--shots", 2, "--resume", keep)
        after = results(keep)
        self.assertEqual(len(after), 8)
        self.assertEqual({key: after[key] for key in before}, before)
        self.refused(2, "shots is 2 there, 1 here", *words, "--shots", 1, "--resume", keep)
        chat = self.good(*words[:-6], "--questions", 1, "--max-tokens", 8, "--chat", "--json", "-").json()
        self.assertEqual((chat["match"], chat["shots"]), ("last number", 0))

    def test_longbench(self):
        records = [{"task": "passage_count", "prompt": "Count. %s The number is:" % ("Words and words. " * 200),
                    "answers": ["7"]},
                   {"task": "hotpotqa", "prompt": "Question: What is the capital of France?\nAnswer:", "answers": ["Paris"]}]
        file = self.path("long.jsonl.gz")
        with gzip.open(file, "wt") as opened:
            opened.writelines(json.dumps(r) + "\n" for r in records)
        words = ["eval", "longbench", "-m", "tiny", "--file", file, "--cache", "kivi:bits=4", "--ctx", 300,
                 "--max-tokens", 8, "--json", "-"]
        got = self.good(*words).json()
        count, question = got["results"][:2]
        self.assertTrue(280 < count["prompt_tokens"] <= 292, count)
        self.assertLess(question["prompt_tokens"], 80)
        self.assertEqual([(t["task"], t["metric"], t["prompts"]) for t in got["rows"][0]["tasks"]],
                         [("hotpotqa", "F1", 1), ("passage_count", "count", 1)])
        self.assertAlmostEqual(got["rows"][1]["score"], sum(t["score"] for t in got["rows"][1]["tasks"]) / 2)
        one = self.good(*words, "--task", "hotpotqa", "--raw").json()
        self.assertEqual([r["item"] for r in one["results"]], [1, 1])
        self.refused(2, "task qa: one of", *words, "--task", "qa")
        self.refused(2, "no prompt of these", *words, "--task", "qasper")
        bad = self.path("bad.jsonl", json.dumps({"task": "hotpotqa", "prompt": "x", "answers": []}) + "\n")
        self.refused(2, "bad.jsonl, line 1: .*answers", "eval", "longbench", "-m", "tiny", "--cache", "kivi", "--file", bad)

    def test_ifeval(self):
        file = self.path("rules.jsonl", "".join(json.dumps(r) + "\n" for r in [
            {"key": 11, "prompt": "Say something without commas.", "instruction_id_list": ["punctuation:no_comma"],
             "kwargs": [{}]},
            {"key": 12, "prompt": "In French.", "instruction_id_list": ["language:response_language"],
             "kwargs": [{"language": "fr"}]},
            {"key": 13, "prompt": "Say hi.", "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
             "kwargs": [{}, {"keywords": ["zebra"]}]}]))
        got = self.good("eval", "ifeval", "-m", "tiny", "--file", file, "--cache", "kivi:bits=4", "--max-tokens", 12,
                        "--json", "-").json()
        self.assertEqual([r["item"] for r in got["results"]], [11, 13] * 2)
        for r in got["results"]:
            kept = ["," not in r["answer"]] + (["zebra" in r["answer"].lower()] if r["item"] == 13 else [])
            self.assertEqual((r["kept"], r["hit"]), (kept, all(kept)))
        row = got["rows"][0]
        self.assertAlmostEqual(row["instructions_kept"], sum(sum(r["kept"]) for r in got["results"][:2]) / 3)

    def test_perplexity(self):
        words = ["-m", "tiny", "--weights", "as-is", "--cache", "kivi:bits=2", "--window", 160]
        ppl = self.good("eval", "ppl", "-f", SAMPLE, "--chunks", 3, "--json", "-", *words).json()
        kl = self.good("eval", "kl", "-f", SAMPLE, "--chunks", 3, "--json", "-", *words).json()
        self.assertEqual([r["spec"] for r in ppl["rows"]], ["f16", "kivi:bits=2"])
        self.assertEqual([r["spec"] for r in kl["rows"]], ["f16", "floor", "kivi:bits=2"])
        self.assertEqual(ppl["rows"][1]["ppl"], kl["rows"][2]["ppl"])
        self.assertEqual(ppl["rows"][0]["tokens"], 3 * (160 - 81))  # the second halves
        self.assertGreater(kl["rows"][2]["kl_mean"], 10 * kl["rows"][1]["kl_mean"])
        self.assertGreater(ppl["rows"][1]["ppl_ratio_error"], 0)
        self.refused(2, "chunks 100000.*windows", "eval", "ppl", "-f", SAMPLE, "--chunks", 100000, *words)
        code = self.path("code.jsonl.gz")
        with gzip.open(code, "wt") as opened:
            for n in range(60):
                opened.write(json.dumps({"prompt": "def f%d(x):\n" % n, "canonical_solution": "    return x\n"}) + "\n")
        got = self.good("eval", "humaneval", "--file", code, "--json", "-", *words).json()
        self.assertEqual(len(got["rows"]), 2)
        self.assertLess(got["rows"][0]["ppl"], ppl["rows"][0]["ppl"])  # always the same function


class FreeUsage(Case):
    needs_model = False

    def test_bad_usage(self):
        words = ["eval", "gsm8k", "-m", "nowhere.gguf", "--cache", "mixkvq"]
        self.refused(2, "--file: name the file, or set KVMOSAIC_DATA", *words, env=NO_DATA)
        self.refused(2, "gsm8k_test.jsonl .folder of KVMOSAIC_DATA", *words, env={"KVMOSAIC_DATA": self.folder})
        self.refused(2, "batch", *words, "--batch", 0)
        self.refused(2, "kivy", "eval", "gsm8k", "-m", "nowhere.gguf", "--cache", "kivy")
        empty, broken = self.path("empty.jsonl", ""), self.path("broken.jsonl", "{}\n")
        self.refused(2, "empty.jsonl: has no records", *words, "--file", empty, "--shots", 0)
        self.refused(2, "broken.jsonl, line 1: has no text in the field 'question'", *words, "--file", broken)
        unmarked = self.path("unmarked.jsonl", json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
        self.refused(2, "unmarked.jsonl, line 1: .*no number behind", *words, "--file", unmarked)
        good = self.path("good.jsonl", json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
        self.refused(2, "shots 2: the training file has 1", *words, "--file", good, "--train", good, "--shots", 2)
        self.refused(2, "skip 1: the file has 1", *words, "--file", good, "--shots", 0, "--skip", 1)
        self.refused(1, "not_there.jsonl", *words, "--file", self.path("not_there.jsonl"), "--shots", 0)
        self.refused(2, "mine.json.*--force", *words, "--json", self.path("mine.json", "mine"))
        gz = self.path("plain.jsonl.gz", "no gzip")
        self.refused(1, "plain.jsonl.gz: is not a whole gzip", *words, "--file", gz, "--shots", 0)
        rules = self.path("rules.jsonl", json.dumps({"key": 1, "prompt": "x", "instruction_id_list": ["a:b"], "kwargs": [{}]}))
        self.refused(2, "rules.jsonl, line 1: unknown kind of instruction 'a:b'", "eval", "ifeval", "-m", "nowhere.gguf",
                     "--cache", "mixkvq", "--file", rules)


if __name__ == "__main__":
    raise SystemExit(main(Generate, Tasks, FreeUsage))
