#!/usr/bin/env python3
"""Usage, errors, methods, inspect. See support.py."""
import os
import shutil

from support import Case, PROGRAM, SAMPLE, main


class Usage(Case):
    needs_model = False

    def test_help_and_version(self):
        self.assertRegex(self.good("--version").out, r"^kvmosaic \d+\.\d+\.\d+ \(commit \S+\)\n$")
        top = self.good("--help").out
        for verb in ["run", "advise", "compare", "eval", "calibrate", "tune", "bench", "inspect", "methods", "fetch", "serve",
                     "devices"]:
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
            if method["calibrated"]:
                self.refused(2, "calib must be given.*calibrate", "inspect", "--cache", method["method"], "--head-dim", 64)
                continue
            options = ",".join("%s=%s" % (o["name"], o["default"]) for o in method["options"])
            spec = method["method"] + (":" + options if options else "")
            sides = self.good("inspect", "--cache", spec, "--head-dim", 64, "--json").json()["sides"]
            plain = self.good("inspect", "--cache", method["method"], "--head-dim", 64, "--json").json()["sides"]
            self.assertEqual(sides, plain)


class Inspect(Case):
    def test_parts_cover_the_page_without_gaps(self):
        specs = ["f32", "kivi:bits=2", "kivi:bits=3,group=64"]
        specs += [m["method"] for m in self.good("methods", "--json").json()["methods"] if not m["calibrated"]]
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
        words = ["inspect", "-m", "tiny", "-f", SAMPLE, "--ctx", 280, "--cache", "mixkvq"]
        everything = self.good(*words, "--json").json()
        self.assertEqual(everything["tokens"], 280)
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


if __name__ == "__main__":
    raise SystemExit(main(Usage, Methods, Inspect))
