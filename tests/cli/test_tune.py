#!/usr/bin/env python3
"""tune on the real model: grids, Optuna where it is installed, studies that go on. See support.py."""
import json
import os
import shutil
import subprocess
import unittest

from support import PROGRAM, SAMPLE, SOURCE, Case, call, main, sample

FEW = ["-m", "tiny", "--weights", "f16", "--window", 256, "--ctx", 1024]
SCRIPT = os.path.join(SOURCE, "tools", "tune", "tune_optuna.py")


def has_optuna():
    return any(subprocess.run([python, SCRIPT, "--check"], capture_output=True).returncode == 0
               for python in ("python3", "/usr/bin/python3") if python == "python3" or os.path.exists(python))


def front(rows):
    """By the definition, of rows with a finite KL and bits that are no floor."""
    points = [r for r in rows if r["label"] != "floor"]
    better = lambda a, b: (a["true_bits"] <= b["true_bits"] and a["kl_mean"] <= b["kl_mean"] and
                           (a["true_bits"], a["kl_mean"]) != (b["true_bits"], b["kl_mean"]))
    return [r["trial"] for r in points if not any(better(other, r) for other in points)]


class Tune(Case):
    def kivi(self, study, *more):
        return ["tune", *FEW, "-f", SAMPLE, "--method", "kivi", "--tune", "bits", "--range", "bits=1,2,4", "--sampler",
                "grid", "--trials", 3, "--study", study, *more]

    def test_grid_front_holdout_and_a_study_that_goes_on(self):
        study, other = self.path("kivi.study"), self.path("other.txt", sample(9000)[6000:])
        first = self.good(*self.kivi(study, "--json", "-")).json()
        rows = first["rows"]
        self.assertEqual([(r["label"], r["values"].get("bits")) for r in rows],
                         [("kivi", "2"), ("floor", None), ("", "1"), ("", "4")])  # 2 is known from the default
        by_bits = {r["values"]["bits"]: r for r in rows if r["values"]}
        self.assertTrue(by_bits["4"]["kl_mean"] < by_bits["2"]["kl_mean"] < by_bits["1"]["kl_mean"])
        self.assertTrue(by_bits["4"]["true_bits"] > by_bits["2"]["true_bits"] > by_bits["1"]["true_bits"] > 1)
        self.assertEqual(sorted(r["trial"] for r in rows if r["front"]), sorted(front(rows)))
        self.assertLess(rows[1]["kl_mean"], 1e-3)
        self.assertGreater(rows[1]["true_bits"], 32)
        # What compare says of the same cache on the same text.
        compared = self.good("compare", *FEW[:4], "-f", SAMPLE, "--window", 256, "--windows", 1, "--score-from", 128,
                             "--cache", "kivi", "--json", "-").json()["rows"][-1]
        self.assertAlmostEqual(rows[0]["kl_mean"] / compared["kl_mean"], 1, delta=1e-3)
        self.assertAlmostEqual(rows[0]["ppl_ratio"], compared["ppl_ratio"], delta=1e-5)
        self.assertAlmostEqual(rows[0]["true_bits_window"], compared["true_bits"], delta=1e-9)
        # A line less is one setting to measure again, and the same comes out.
        with open(study) as file:
            lines = file.read().splitlines(True)
        with open(study, "w") as file:
            file.writelines(lines[:-1])
        out = self.path("spec")
        plot = ["--plot", self.path("front.svg")] if shutil.which("gnuplot") else []
        told = self.good(*self.kivi(study, *plot, "--bits", 4, "-o", out, "--holdout", other, "--json", self.path("all.json")))
        with open(study) as file:
            again = [json.loads(line) for line in file]
        self.assertEqual([t["search"] for t in again[1:]], [json.loads(line)["search"] for line in lines[1:]])
        with open(out) as file:
            spec = file.read().strip()
        self.assertEqual(spec, "kivi")
        if plot:
            with open(plot[1]) as file:
                svg = file.read()
            self.assertRegex(svg, r"^<svg[\s\S]*true bits per value at 1024 tokens[\s\S]*</svg>\n$")
            self.assertIn(">0: kivi<", svg)
        self.assertIn("run it with: kvmosaic run -m tiny --cache kivi -p", told.out)
        self.assertRegex(told.out, "which the search did not see")
        self.assertRegex(told.out, r"leads kivi \(trial 0\)")
        with open(self.path("all.json")) as file:
            rows = json.load(file)["rows"]
        for row in rows:
            self.assertEqual("holdout" in row, row["front"] or bool(row["label"] == "kivi"))
        # The study of something else is refused, and stays.
        with open(study) as file:
            before = file.read()
        self.refused(2, "windows is 1 there, 2 here", *self.kivi(study, "--windows", 2))
        self.refused(2, "method is .*kivi.* there", "tune", *FEW, "-f", SAMPLE, "--method", "kitty", "--sampler", "grid",
                     "--study", study)
        self.refused(2, "text_sha256", "tune", *FEW, "-f", other, *self.kivi(study)[11:])
        self.refused(2, "not the file of a search", *self.kivi(self.path("mine", "mine\n")))
        self.refused(2, "is the text of the search", *self.kivi(study, "--holdout", SAMPLE))
        with open(study) as file:
            self.assertEqual(file.read(), before)

    def test_widths_of_layers_become_a_file_that_run_takes(self):
        file, study = self.path("found.calib"), self.path("kvtuner.study")
        words = ["tune", *FEW, "-f", SAMPLE, "--method", "kvtuner", "--groups", 2, "--sampler", "grid", "--trials", 2,
                 "--study", study, "--json", "-"]
        self.refused(2, "-o: .*calibration file", *words)
        got = self.good(*words, "-o", file).json()
        layers = [layer for one in got["space"] for layer in one["layers"]]
        self.assertEqual(sorted(layers), list(range(30)))
        self.assertEqual([r["label"] for r in got["rows"][:4]],
                         ["all layers 4/4", "all layers 2/2", "calibrate --bits 4", "floor"])
        chosen = next(r for r in got["rows"] if r["chosen"])
        with open(file) as opened:
            pairs = [line.split()[6:] for line in opened if line.startswith("array bits ")]
        self.assertEqual([[int(float(x)) for x in pair] for pair in pairs], chosen["widths"])
        self.good("run", "-m", "tiny", "--cache", got["use"], "-p", "Hello", "-n", 2)

    def test_right_answers_as_the_objective(self):
        sums = [("Ann has 3 pears and buys 4. How many has she?", "3 + 4 = 7.\n#### 7"),
                ("Tom has 5 cups and breaks 2. How many are left?", "5 - 2 = 3.\n#### 3"),
                ("A box holds 6 eggs. How many do 2 boxes hold?", "6 * 2 = 12.\n#### 12"),
                ("Sue had 9 coins and gave 4 away. How many has she?", "9 - 4 = 5.\n#### 5")]
        file = self.path("sums.jsonl", "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in sums))
        study, few = self.path("sums.study"), ["--shots", 4, "--max-tokens", 16]
        asked = ["--questions", 3, "--holdout-questions", 1]
        words = ["tune", "-m", "tiny", "--weights", "as-is", *FEW[4:], "-f", SAMPLE, "--method", "kivi", "--tune", "bits",
                 "--range", "bits=2,4", "--sampler", "grid", "--trials", 2, "--study", study, "--objective", "gsm8k",
                 "--problems", file, "--train", file, *few]
        got = self.good(*words, *asked, "--json", "-").json()
        self.assertEqual((got["objective"], got["questions"], got["holdout"]["first"]), ("gsm8k", 3, 3))
        rows = got["rows"]
        self.assertEqual([r["label"] for r in rows], ["kivi", "floor", "f16", ""])
        # What the verb that only answers says of the same cache.
        alone = self.good("eval", "gsm8k", "-m", "tiny", "--file", file, "--train", file, *few, "--questions", 4, "--cache",
                          "kivi:bits=4", "--json", "-").json()
        for spec, row in (("f16", rows[2]), ("kivi:bits=4", rows[3])):
            right = [r["hit"] for r in alone["results"] if r["canonical"] == spec]
            self.assertEqual(row["hits"], sum(right[:3]), spec)
            if "holdout" in row:
                self.assertEqual(row["holdout"]["hits"], sum(right[3:]), spec)
        self.assertIn("holdout", rows[2])
        self.assertGreater(rows[2]["hits"], 0, "f16 copies an answer that it was shown")
        self.assertEqual([r["front"] for r in rows[1:3]], [False, False])
        self.assertTrue(all(r["kl_mean"] >= 0 and r["problems"] == 3 for r in rows))
        with open(study) as opened:
            before = opened.read()
        told = self.good(*words, *asked).out  # from the study alone
        self.assertRegex(told, "3 problems behind 4 solved ones")
        self.assertRegex(told, "the same on problem 4, which the search did not see")
        with open(study) as opened:
            self.assertEqual(opened.read(), before)
        self.refused(2, "questions is 3 there, 2 here", *words, "--questions", 2)
        self.refused(2, 'objective is "gsm8k" there, "kl" here', *words[:words.index("--objective")])

    def test_bad_usage(self):
        study, nowhere = self.path("s.study"), ["-m", "nowhere.gguf", "-f", SAMPLE]
        words = ["tune", *nowhere, "--study", study, "--sampler", "grid", "--method"]
        self.refused(2, "f16: has nothing to tune; one of mosaic", *words, "f16")
        self.refused(2, "did you mean mixkvq", *words, "mixkvk")
        self.refused(2, "--tune front: .*hi, mid", *words, "mixkvq", "--tune", "front")
        self.refused(2, "--range hi=2..1", *words, "mixkvq", "--range", "hi=2..1")
        self.refused(2, "--bits and --kl", *words, "mixkvq", "--bits", 3, "--kl", 0.1)
        self.refused(2, "taken.*--force", *words, "mixkvq", "-o", self.path("taken", "mine"))
        self.refused(2, "folder .* does not exist", "tune", *nowhere, "--method", "mixkvq", "--sampler", "grid", "--study",
                     self.path("no/s.study"))
        self.refused(1, "nowhere.gguf", *words, "mixkvq")
        self.refused(2, "need 262144 tokens", "tune", "-m", "tiny", "--weights", "as-is", "-f", SAMPLE, "--method", "kivi",
                     "--sampler", "grid", "--study", study, "--windows", 128)
        self.refused(2, "--trials", *words, "mixkvq", "--trials", 0)
        one = self.path("one.jsonl", '{"question": "2 and 2?", "answer": "4.\\n#### 4"}\n')
        answers = [*words, "mixkvq", "--objective", "gsm8k", "--problems", one, "--train", one]
        self.refused(2, "--questions: says something of --objective gsm8k only", *words, "mixkvq", "--questions", 5)
        self.refused(2, "--questions 2: the file has 1", *answers, "--shots", 1, "--questions", 2)
        self.refused(2, "--shots 4: the training file has 1", *answers)
        self.refused(2, "--holdout-questions 1: behind the 1 .* has 0", *answers, "--shots", 1, "--questions", 1,
                     "--holdout-questions", 1)
        self.refused(2, "--holdout: .*--holdout-questions", *answers, "--holdout", SAMPLE)
        self.refused(2, "--kl: ", *answers, "--kl", 0.1)
        self.assertFalse(os.path.exists(study))

    def test_a_python_without_optuna_is_told_what_it_lacks(self):
        bare = self.path("bare", "#!/bin/sh\nexit 3\n")
        os.chmod(bare, 0o755)
        words = ["tune", *FEW, "-f", SAMPLE, "--method", "kivi", "--study", self.path("o.study")]
        self.refused(1, "--sampler tpe: .*package optuna.*pip install optuna", *words, env={"KVMOSAIC_PYTHON": bare})
        self.refused(1, "needs Python 3, tried .*nothing", *words, env={"KVMOSAIC_PYTHON": self.path("nothing")})


@unittest.skipUnless(has_optuna(), "Python's package optuna is not installed")
class TuneOptuna(Case):
    def words(self, study, *more):
        return ["tune", *FEW, "-f", SAMPLE, "--method", "kivi:group=32", "--tune", "bits", "--sampler", "nsga2", "--trials",
                3, "--seed", 4, "--study", study, "--json", "-", *more]

    def test_the_same_seed_tries_the_same_and_a_stopped_search_goes_on(self):
        study, again = self.path("a.study"), self.path("b.study")
        rows = self.good(*self.words(study)).json()["rows"]
        tried = [r["values"]["bits"] for r in rows if not r["label"]]
        self.assertEqual(len(set(tried)), len(tried))
        self.assertTrue(2 <= len(tried) <= 3, tried)  # the default may be among the three
        with open(study) as file:
            lines = file.read().splitlines(True)
        self.assertRegex(json.loads(lines[0])["sampler_version"], r"^\d")
        with open(again, "w") as file:
            file.writelines(lines[:-1])
        more = self.good(*self.words(again)).json()["rows"]
        self.assertEqual([r["values"] for r in more], [r["values"] for r in rows])
        self.assertEqual([r["kl_mean"] for r in more], [r["kl_mean"] for r in rows])
        other = ["tpe" if word == "nsga2" else word for word in self.words(study)]
        self.refused(2, "sampler is .nsga2. there, .tpe. here", *other)

    def test_the_server_answers_and_refuses(self):
        words = [*self.words(self.path("c.study")), "--serve", "by hand"]
        requests = ['{"values": {"bits": "4"}}', '{"values": {"bits": "5"}}', "nonsense", '{"values": {"bits": "4"}}']
        answers = [json.loads(line) for line in self.good(*words, stdin="\n".join(requests) + "\n").out.splitlines()]
        self.assertEqual(answers[0]["space"][0]["name"], "bits")
        self.assertEqual(answers[0]["defaults"], [["2"]])
        self.assertEqual((answers[1]["known"], answers[1]["spec"]), (False, "kivi:bits=4"))
        self.assertRegex(answers[2]["error"], "bits.*one of 1, 2, 3")
        self.assertRegex(answers[3]["error"], "bits has none")
        self.assertEqual(answers[4], dict(answers[1], known=True))


if __name__ == "__main__":
    raise SystemExit(main(Tune, TuneOptuna))
