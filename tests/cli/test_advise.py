#!/usr/bin/env python3
"""advise, and compare at matched bits, on the real model. See support.py."""
import json

from support import Case, SAMPLE, main, sample


class Advise(Case):
    QUICK = ["advise", "-m", "tiny", "--quick", "--json", "-"]

    def ask(self, *words):
        return self.good(*self.QUICK, *words).json()

    def roles(self, got):
        return {row["role"]: row for row in reversed(got["rows"])}

    def test_memory_is_weights_buffers_and_cache(self):
        got = self.ask("--memory", "230MiB", "--ctx", 4096)
        budget = 230 * 2 ** 20 - got["weights_bytes"] - got["compute_bytes"]
        self.assertEqual(got["budget_bytes"], budget)
        self.assertGreater(got["weights_bytes"], 90 * 2 ** 20)
        best, larger = self.roles(got)["recommended"], self.roles(got)["larger"]
        self.assertEqual((got["recommended"], got["met"], got["reasons"]), (best["spec"], True, []))
        self.assertTrue(best["fits"] and best["cache_bytes"] <= budget < larger["cache_bytes"], got)
        self.assertGreaterEqual(best["tokens_that_fit"], 4096)
        self.assertTrue(0 < larger["tokens_that_fit"] < 4096)
        self.assertEqual(best["total_bytes"] - best["cache_bytes"], got["weights_bytes"] + got["compute_bytes"])
        # the same wish put as memory of the cache, and as bits
        self.assertEqual(self.ask("--cache-memory", "%dKiB" % (budget // 1024), "--ctx", 4096)["rows"][0]["spec"],
                         best["spec"])
        bits = self.ask("--bits", best["true_bits"] + 0.01, "--ctx", 4096)
        self.assertEqual(bits["recommended"], best["spec"])
        self.assertIsNone(bits["rows"][0]["tokens_that_fit"])
        self.assertEqual(self.ask("--bits", best["true_bits"] + 0.01, "--ctx", 4096)["rows"], bits["rows"])
        two = self.ask("--bits", best["true_bits"] + 0.01, "--ctx", 4096, "--parallel", 2)
        self.assertEqual(two["rows"][0]["cache_bytes"], 2 * best["cache_bytes"])
        self.assertIn("serve -m tiny --cache %s --ctx 8192 -np 2" % best["spec"], two["run"])

    def test_what_is_promised_is_what_run_weighs(self):
        text = self.path("text.txt", sample(4000))
        for bits in (3, 6):
            rows = self.good("run", "-m", "tiny", "-f", text, "--raw", "-n", 1, "--temp", 0, "--json", "-", "--cache",
                             self.ask("--bits", bits, "--ctx", 1200)["recommended"]).json()
            got = self.ask("--bits", rows["true_bits"] + 0.02, "--ctx", rows["cache_tokens"])
            same = [row for row in got["rows"] if row["spec"] == rows["spec"]]
            self.assertEqual(len(same), 1, (rows["spec"], got["rows"]))
            self.assertAlmostEqual(same[0]["cache_bytes"] / rows["cache_bytes"], 1, delta=0.002)
            self.assertAlmostEqual(same[0]["true_bits"], rows["true_bits"], delta=0.01)

    def test_impossible_wishes_get_the_nearest(self):
        got = self.ask("--bits", 3)
        self.assertEqual((got["context"], got["wish"]["context"], got["met"]), (8192, None, True))
        got = self.ask("--bits", 3, "--ctx", 9000)
        self.assertEqual((got["context"], got["wish"]["context"], got["met"]), (8192, 9000, False))
        self.assertRegex(got["reasons"][0], "trained for 8192 tokens")
        got = self.ask("--bits", 0.5, "--ctx", 1024)
        self.assertRegex(" ".join(got["reasons"]), "0.5 bits are below all settings")
        self.assertFalse(got["met"] or got["rows"][0]["fits"])
        got = self.ask("--memory", "50MiB", "--ctx", 4096)
        self.assertRegex(" ".join(got["reasons"]), "50.0 MiB are too little: weights take .* is the least that works")
        self.assertFalse(got["met"])
        got = self.ask("--cache-memory", "4MiB", "--ctx", 8192)
        self.assertRegex(" ".join(got["reasons"]), "8192 tokens do not fit; %d is the most" % got["context"])
        self.assertTrue(256 <= got["context"] < 8192 and got["rows"][0]["fits"], got)
        self.assertLessEqual(got["rows"][0]["cache_bytes"], 4 * 2 ** 20)
        self.assertIn("--ctx %d" % got["context"], got["run"])
        got = self.ask("--memory", "4GiB", "--ctx", 4096)
        self.assertEqual((got["recommended"], got["met"]), ("f16", True))
        self.assertRegex(got["reasons"][0], "16-bit cache of 4096 tokens fits")

    def test_measured(self):
        words = ["advise", "-m", "tiny", "--bits", 4, "--ctx", 2048, "--tokens", 640, "--weights", "as-is"]
        target = self.path("advice.json")
        text = self.good(*words, "--json", target).out
        with open(target) as file:
            got = json.load(file)
        roles = self.roles(got)
        self.assertEqual(set(roles), {"recommended", "smaller", "larger", "other", "reference"})
        self.assertEqual((got["rows"][-1]["spec"], got["rows"][-1]["kl_mean"], got["rows"][-1]["top1"]), ("f16", 0, 1))
        for row in got["rows"][:-1]:
            self.assertEqual(row["tokens"], 320)
            self.assertTrue(0 < row["kl_mean"] < 3 and 0.3 < row["top1"] <= 1 and row["kl_error"] > 0, row)
        self.assertTrue(roles["smaller"]["kl_mean"] > roles["recommended"]["kl_mean"] > roles["larger"]["kl_mean"])
        self.assertNotEqual(roles["other"]["method"], roles["recommended"]["method"])
        self.assertTrue(roles["other"]["fits"])
        self.assertEqual(got["measured_on"]["text"], "data/sample.txt")
        self.assertRegex(text, r"Take %s: .*one prediction in \d+" % got["recommended"])
        self.assertIn(got["run"], text)
        self.assertIn("%9.5f" % roles["other"]["kl_mean"], text)

    def test_bad_usage(self):
        words = ["advise", "-m", "nowhere.gguf"]
        self.refused(2, "Exactly one of --memory.*--bits", *words)
        self.refused(2, "Exactly one of", *words, "--memory", "4G", "--bits", 3)
        self.refused(2, "--memory 4: a number and a unit", *words, "--memory", "4")
        self.refused(2, "--memory lots: a number", *words, "--memory", "lots")
        self.refused(2, "--cache-memory 5K: 1MiB to", *words, "--cache-memory", "5K")
        self.refused(2, "--bits -1", *words, "--bits", "-1")
        self.refused(2, "--bits 100: ", *words, "--bits", 100)
        self.refused(2, "--ctx", *words, "--bits", 3, "--ctx", 0)
        self.refused(2, "--parallel", *words, "--bits", 3, "--parallel", 0)
        self.refused(2, "mine.json.*--force", *words, "--bits", 3, "--json", self.path("mine.json", "mine"))
        self.refused(1, "nowhere.gguf: no such file", *words, "--bits", 3)
        self.refused(2, "short.txt: has .* tokens, 1024 are needed", "advise", "-m", "tiny", "--bits", 3, "--weights",
                     "as-is", "-f", self.path("short.txt", sample(500)))


class MatchBits(Case):
    def test_settings_near_a_budget_and_how_near(self):
        words = ["compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--tokens", 400, "--match-bits", "3.3,2.5",
                 "--match-ctx", 4096, "--method", "kivi", "--method", "mixkvq", "--method", "q4_0"]
        target = self.path("match.json")
        table = self.good(*words, "--json", target).out
        with open(target) as file:
            got = json.load(file)
        match = got["match"]
        self.assertEqual((match["context"], match["within"]), (4096, 0.25))
        self.assertEqual([(s["budget"], s["method"]) for s in match["settings"]],
                         [(b, m) for b in (3.3, 2.5) for m in ("kivi", "mixkvq", "q4_0")])
        compared = {s["spec"] for s in match["settings"] if s["compared"]}
        self.assertEqual({row["spec"] for row in got["rows"]}, compared | {"f16", "floor"})
        for s in match["settings"]:
            self.assertAlmostEqual(s["true_bits"] - s["budget"], s["residual"])
            self.assertEqual(s["compared"], abs(s["residual"]) <= 0.25, s)
            self.assertIn(s["spec"], table)
        self.assertFalse([s for s in match["settings"] if s["method"] == "q4_0" and s["compared"]])
        self.assertRegex(table, r"3.3 +q4_0\S* +4.\d\d +\+1.\d\d +no setting of q4_0 is nearer; not compared")
        # the bits that are matched are those of a cache of that length: here one as long as the window
        words[words.index(4096)], words[words.index("3.3,2.5")] = 400, "6.9,4.2"
        got = self.good(*words, "--cache", "mixkvq", "--json", "-").json()
        self.assertEqual(got["rows"][2]["spec"], "mixkvq")
        by_spec = {row["spec"]: row for row in got["rows"]}
        compared = [s for s in got["match"]["settings"] if s["compared"]]
        self.assertEqual({s["method"] for s in compared}, {"kivi", "mixkvq"})
        for s in compared:
            self.assertAlmostEqual(by_spec[s["spec"]]["true_bits"], s["true_bits"], delta=0.02)

    def test_bad_usage(self):
        words = ["compare", "-m", "nowhere.gguf", "-f", SAMPLE]
        self.refused(2, "--cache SPEC is needed", *words)
        self.refused(2, "go with --match-bits", *words, "--cache", "kivi", "--method", "kivi")
        self.refused(2, "--match-bits 0.1: 0.5 to 32", *words, "--match-bits", "2.5,0.1")
        self.refused(2, "--method kivy: .*kivi", *words, "--match-bits", 3, "--method", "kivy")
        self.refused(2, "--method kvquant: .*calib", *words, "--match-bits", 3, "--method", "kvquant")
        self.refused(2, "given twice", *words, "--match-bits", 3, "--method", "kivi", "--method", "kivi")
        self.refused(2, "--match-ctx", *words, "--match-bits", 3, "--match-ctx", -5)


if __name__ == "__main__":
    raise SystemExit(main(Advise, MatchBits))
