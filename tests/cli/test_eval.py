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
            self.assertEqual(file.read(), first)
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


if __name__ == "__main__":
    raise SystemExit(main(Passkey))
