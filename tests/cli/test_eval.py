#!/usr/bin/env python3
"""eval on the real model. See support.py."""
import json
import re

from support import Case, SAMPLE, main


class Passkey(Case):
    WORDS = ["eval", "passkey", "-m", "tiny", "--weights", "as-is", "--lengths", "160,300", "--depths", "0.5",
             "--trials", 2, "--cache", "kivi:bits=2"]

    def test_answers_land_and_are_not_asked_again(self):
        lines = self.path("keys.jsonl")
        got = self.good(*self.WORDS, "--resume", lines, "--json", "-").json()
        with open(lines) as file:
            first = file.read()
        records = [json.loads(line) for line in first.splitlines()]
        self.assertEqual(records[0]["kind"], "kvmosaic passkey 1")
        self.assertEqual(len(records), 1 + 2 * 2 * 2)
        self.assertEqual([(r["spec"], r["length"], r["trials"]) for r in got["rows"]],
                         [("f16", 160, 2), ("f16", 300, 2), ("kivi:bits=2", 160, 2), ("kivi:bits=2", 300, 2)])
        keys = {}
        for r in records[1:]:
            self.assertLessEqual(r["tokens"], r["length"])
            self.assertGreater(r["tokens"], r["length"] - 32)
            self.assertEqual(r["hit"], r["key"] in re.findall(r"\d+", r["answer"]), r)
            # every cache is asked the same
            self.assertEqual(keys.setdefault((r["length"], r["depth"], r["trial"]), r["key"]), r["key"])
        self.assertEqual(len(set(keys.values())), 4)
        self.assertGreaterEqual(sum(r["hit"] for r in records[1:] if r["spec"] == "f16"), 3)
        # A line that was cut off is asked again; finished ones stay as they are.
        with open(lines, "w") as file:
            file.write(first[:-20])
        self.good(*self.WORDS, "--resume", lines)
        with open(lines) as file:
            again = file.read()
        self.assertEqual(again.splitlines()[:-1], first.splitlines()[:-1])
        self.assertEqual(json.loads(again.splitlines()[-1])["answer"], records[-1]["answer"])
        self.refused(2, "seed is 1 there, 2 here", *self.WORDS, "--resume", lines, "--seed", 2)
        self.refused(2, "not a file of passkey results", *self.WORDS, "--resume", self.path("other", "hello\n"))
        self.refused(2, "not a file of passkey results", *self.WORDS, "--resume", self.path("cut", "hello"))

    def test_bad_usage(self):
        words = ["eval", "passkey", "-m", "nowhere.gguf", "--cache", "mixkvq"]
        self.refused(2, "depths 1.5: 0 to 1", *words, "--depths", "0,1.5")
        self.refused(2, "lengths 20: 96", *words, "--lengths", 20)
        self.refused(2, "trials 0", *words, "--trials", 0)
        self.refused(2, "twice", *words, "--cache", "mixkvq")
        self.refused(2, "kivi", *words, "--cache", "kivy")
        self.refused(2, "keys.json.*--force", *words, "--json", self.path("keys.json", "mine"))
        self.refused(2, "lengths 8192: 96 to 8176", "eval", "passkey", "-m", "tiny", "--weights", "as-is", "--cache",
                     "mixkvq", "--lengths", "512,8192")
        self.refused(2, "subcommand", "eval")


class Component(Case):
    FIELDS = {"spec", "attention_kl", "output_mse", "output_cosine", "sink_error", "plans", "mask_unchanged",
              "persistent_bytes", "true_bits"}

    def test_layer_of_a_model(self):
        words = ["eval", "component", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--layer", 3, "--prefill", 280,
                 "--decode", 8]
        got = self.good(*words, "--cache", "pnmix", "--cache", "kivi:bits=4", "--cache", "kivi:bits=2", "--json", "-").json()
        self.assertEqual((got["layer"], got["prefill"], got["decode"]), (3, 280, 8))
        f16, pnmix, four, two = got["rows"]
        for row in got["rows"]:
            self.assertTrue(self.FIELDS <= set(row), row)
        self.assertLess(f16["attention_kl"], 1e-6)
        self.assertGreater(f16["output_cosine"], 1 - 1e-6)
        self.assertTrue(f16["attention_kl"] < four["attention_kl"] < two["attention_kl"])
        self.assertTrue(f16["output_mse"] < four["output_mse"] < two["output_mse"])
        self.assertTrue(f16["output_cosine"] > four["output_cosine"] > two["output_cosine"] > 0.5)
        self.assertEqual((four["plans"], four["mask_unchanged"]), (0, None))
        # one saliency a KV head (3 of them), and decoding changes no mask
        self.assertEqual((pnmix["plans"], pnmix["mask_unchanged"]), (3, True))
        self.refused(2, "layer 30: 0 to 29", *words[:-6], "--layer", 30, "--cache", "mixkvq", "--prefill", 60, "--decode", 8)


class Random(Case):
    needs_model = False

    def test_random_network(self):
        words = ["eval", "component", "--prefill", 384, "--decode", 130, "--cache", "mixkvq", "--cache", "pnmix", "--json"]
        got = self.good(*words, "-").json()
        self.assertEqual(got["network"], {"heads": 8, "kv_heads": 2, "head_dim": 64, "seed": 1})
        f16, mixkvq, pnmix = got["rows"]
        self.assertLess(f16["attention_kl"], 1e-6)
        # blocks of 128 behind 4 raw rows, two heads: 2 in the prefill, 1 while decoding
        self.assertEqual(mixkvq["plans"], 2 * ((384 + 130 - 4) // 128))
        self.assertEqual(pnmix["plans"], 2)
        self.assertTrue(mixkvq["mask_unchanged"] and pnmix["mask_unchanged"])
        for row in (mixkvq, pnmix):
            self.assertTrue(1e-4 < row["attention_kl"] < 1, row)
            self.assertTrue(0.7 < row["output_cosine"] < 1, row)
            self.assertLess(row["persistent_bytes"], f16["persistent_bytes"])
        self.assertEqual(self.good(*words, "-").json(), got)
        target = self.path("component.json", "mine")
        self.refused(2, "component.json.*--force", *words, target)
        with open(target) as file:
            self.assertEqual(file.read(), "mine")

    def test_bad_usage(self):
        words = ["eval", "component", "--cache", "mixkvq"]
        self.refused(2, "heads 8.*kv-heads 3", *words, "--kv-heads", 3)
        self.refused(2, "head-dim 7", *words, "--head-dim", 7)
        self.refused(2, "prefill 0", *words, "--prefill", 0)
        self.refused(2, "decode 0", *words, "--decode", 0)
        self.refused(2, "layer", *words, "--layer", 2)
        self.refused(2, "text is needed", *words, "-m", "nowhere.gguf")
        self.refused(2, "seed", *words, "-m", "nowhere.gguf", "--seed", 2)


class Calibrate(Case):
    def test_files_serve_their_methods_and_come_out_equal(self):
        words = ["calibrate", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--tokens", 256, "--method"]
        specs = []
        for method in ("kvquant", "rotatekv", "skvq", "kvtuner"):
            file, again = self.path(method), self.path(method + ".again")
            self.good(*words, method, "-o", file)
            with open(file) as opened:
                text = opened.read()
            self.assertTrue(text.startswith("kvmosaic-calibration 1\nmethod %s\nmodel " % method), text[:80])
            specs.append("%s:calib=%s" % (method, file))
            if method == "kvquant":
                self.good(*words, method, "-o", again)
                with open(again) as opened:
                    self.assertEqual(opened.read(), text)
        for suffix in (",group=32", ",group=32,across=1", ",group=64"):
            specs.append("skvq:calib=%s%s" % (self.path("skvq"), suffix))
        caches = [word for spec in specs for word in ("--cache", spec)]
        rows = self.good("eval", "component", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--prefill", 200, "--decode",
                         4, "--layer", 5, *caches, "--json", "-").json()["rows"]
        self.assertEqual([row["spec"] for row in rows], ["f16", *specs])
        for row in rows[1:]:
            self.assertTrue(1e-6 < row["attention_kl"] < 2, row)
            self.assertGreater(row["output_cosine"], 0.5, row)
        # the file of one method is none for another
        self.refused(2, "method", "inspect", "-m", "tiny", "--cache", "skvq:calib=" + self.path("kvquant"))

    def test_widths_keep_to_the_cap(self):
        def mean_bits(*more):
            file = self.path("kvtuner")
            self.good("calibrate", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--tokens", 128, "--method",
                      "kvtuner", "-o", file, "--force", *more)
            with open(file) as opened:
                pairs = [line.split()[6:] for line in opened if line.startswith("array bits ")]
            self.assertEqual(len(pairs), 30)
            return sum(float(x) for pair in pairs for x in pair) / 60

        self.assertTrue(3 < mean_bits("--bits", 3.25) <= 3.25)
        self.assertEqual(mean_bits("--bits", 2, "--base", "token"), 2)
        self.assertEqual(mean_bits("--bits", 8), 8)

    def test_bad_usage(self):
        words = ["calibrate", "-m", "nowhere.gguf", "-f", SAMPLE, "--method"]
        target = self.path("taken", "mine")
        self.refused(2, "method kivi: one of kvquant", *words, "kivi", "-o", self.path("x"))
        self.refused(2, "-o .*taken.*--force", *words, "kvquant", "-o", target)
        self.refused(2, "--bits.*kvquant", *words, "kvquant", "-o", self.path("x"), "--bits", 3)
        self.refused(2, "bits 1: 2 to 8", *words, "kvtuner", "-o", self.path("x"), "--bits", 1)
        self.refused(2, "--base", *words, "skvq", "-o", self.path("x"), "--base", "token")
        self.refused(2, "tokens 100000000", "calibrate", "-m", "tiny", "--weights", "as-is", "-f", SAMPLE, "--method",
                     "skvq", "-o", self.path("x"), "--tokens", 100000000)
        with open(target) as file:
            self.assertEqual(file.read(), "mine")


if __name__ == "__main__":
    raise SystemExit(main(Passkey, Component, Random, Calibrate))
