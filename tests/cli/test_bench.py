#!/usr/bin/env python3
"""bench: usage, fields and errors of a small quick run. No time is asserted. See support.py."""
import json
import math

from support import Case, main

SIZES = ["--heads", 6, "--kv-heads", 2, "--head-dim", 64, "--working-set", 1, "--rounds", 2]
SMALL = [*SIZES, "--context", 384]
FIELDS = {"spec", "baseline", "device", "isa", "heads", "kv_heads", "head_dim", "batch", "context", "query_rows", "threads",
          "median_us", "min_us", "calls", "bytes", "tb_s"}


class BenchAttend(Case):
    needs_model = False

    def run_small(self, *words, context=384):
        return self.good("bench", "attend", *SIZES, "--context", context, *words, "--json", "-").json()

    def check_rows(self, got, names):
        self.assertEqual([(r["spec"], r["segment"]) for r in got["rows"]], names)
        for row in got["rows"]:
            self.assertLessEqual(FIELDS | {"segment", "error", "path", "accuracy", "ratios", "bandwidth_share"}, set(row))
            self.assertEqual(row["device"], "cpu")
            self.assertGreater(row["bytes"], 0)
            self.assertTrue(0 < row["min_us"] <= row["median_us"], row)
            self.assertAlmostEqual(row["tb_s"], row["bytes"] / row["median_us"] / 1e6)
            # Whether the row was checked against its own values, not how well a kernel rounds (tests/property): ours adds in
            # f32 or rounds weights to 15 bits and sign (fast: to 7), ggml rounds queries and sums to narrow types.
            self.assertTrue(math.isfinite(row["error"]), row)
            self.assertLess(row["error"], 0.1 if row["baseline"] or row["accuracy"] == "fast" else 1e-3, row)
            self.assertEqual(row["accuracy"] in ("exact", "fast"), row["path"] in ("fused", "partly fused"), row)

    def test_rows_have_all_fields_and_small_errors(self):
        got = self.run_small("--cache", "kivi:bits=2", "--cache", "mixkvq", "--cache", "pnmix", "--cache", "bf16", "--baseline",
                             "ggml:f16", "--baseline", "ggml:q8_0", "--baseline", "ggml:q4_0", "--threads", 2, "--commit", "abc")
        self.assertEqual(got["kind"], "kvmosaic bench attend 1")
        self.assertEqual(got["commit"], "abc")
        self.assertTrue(got["machine"] and got["version"])
        self.assertIn("--cache kivi:bits=2 --cache mixkvq", got["command"])
        self.assertGreater(got["read_bandwidth"], 0)
        self.check_rows(got, [("ggml:f16", None), ("ggml:q8_0", None), ("ggml:q4_0", None), ("kivi:bits=2", "packed"),
                              ("kivi:bits=2", "windows"), ("mixkvq", "packed"), ("mixkvq", "windows"), ("pnmix", "packed"),
                              ("pnmix", "windows"), ("bf16", "raw")])
        median = {(r["spec"], r["segment"]): r["median_us"] for r in got["rows"]}
        values = 2 * 2 * 64 * 384
        for row in got["rows"]:
            self.assertEqual(row["calls"], 2)
            self.assertEqual(set(row["ratios"]), {"ggml:f16", "ggml:q8_0", "ggml:q4_0"})
            self.assertAlmostEqual(row["ratios"]["ggml:q4_0"], median["ggml:q4_0", None] / row["median_us"])
            if row["spec"] == "bf16" or row["spec"] == "ggml:f16":
                self.assertEqual(row["bytes"], 2 * values)
        # Windows hold rows at 16 bit that the pages hold at two.
        size = {(r["spec"], r["segment"]): r["bytes"] for r in got["rows"]}
        self.assertLess(size["kivi:bits=2", "packed"], values / 2)
        self.assertGreater(size["kivi:bits=2", "windows"], size["kivi:bits=2", "packed"])

    def test_several_rows_and_sequences(self):
        # Rows of a step see different packed edges: 380 .. 400 crosses the end of a page.
        got = self.run_small("--query-rows", 20, "--batch", 2, "--threads", 3, "--cache", "kivi:bits=4,group=64", "--cache",
                             "kitty", "--baseline", "ggml:f16", "--baseline", "ggml:q8_0,cells", context=400)
        self.check_rows(got, [("ggml:f16", None), ("ggml:q8_0,cells", None), ("kivi:bits=4,group=64", "packed"), ("kivi:bits=4,group=64", "windows"),
                              ("kitty", "packed"), ("kitty", "windows")])
        self.assertEqual({(r["batch"], r["query_rows"], r["threads"]) for r in got["rows"]}, {(2, 20, 3)})

    def test_a_method_that_keeps_outer_layers_raw(self):
        got = self.run_small("--cache", "turboquant")
        self.check_rows(got, [("turboquant", "packed"), ("turboquant", "windows")])
        self.assertEqual({r["path"] for r in got["rows"]} & {"raw"}, set())
        self.assertEqual(got["rows"][0]["ratios"], {})

    def test_fast_is_named_and_told(self):
        words = ["--cache", "kivi:bits=2", "--cache", "f16"]
        exact, fast = self.run_small(*words), self.run_small(*words, "--accuracy", "fast")
        self.assertNotIn("--accuracy", exact["command"])
        self.assertIn("--accuracy fast", fast["command"])
        for got, name in ((exact, "exact"), (fast, "fast")):
            self.check_rows(got, [("kivi:bits=2", "packed"), ("kivi:bits=2", "windows"), ("f16", "raw")])
            for row in got["rows"]:
                self.assertEqual(row["accuracy"], name if row["path"] in ("fused", "partly fused") else None)
        if fast["rows"][0]["path"] == "fused":
            self.assertGreater(fast["rows"][0]["error"], exact["rows"][0]["error"])

    def test_table_and_file(self):
        path = self.path("r.json")
        table = self.good("bench", "attend", *SMALL, "--cache", "kivi:bits=2", "--baseline", "ggml:f16", "--json", path).out
        for word in ["read bandwidth", "x ggml:f16", "packed", "windows"]:
            self.assertIn(word, table)
        with open(path) as file:
            self.assertEqual(len(json.load(file)["rows"]), 3)
        words = ["bench", "attend", *SMALL, "--cache", "kivi:bits=2"]
        self.refused(2, "r.json.*--force", *words, "--json", path)
        self.good(*words, "--json", path, "--force")

    def test_bad_usage(self):
        words = ["bench", "attend", "--cache", "mixkvq"]
        self.refused(2, "--heads 10: a multiple of --kv-heads 4", *words, "--heads", 10, "--kv-heads", 4)
        self.refused(2, "--kv-heads 0: 1 to 32", *words, "--kv-heads", 0)
        self.refused(2, "--kv-heads 64: 1 to 32", *words, "--kv-heads", 64)
        self.refused(2, "--threads 0: 1 to 512", *words, "--threads", 0)
        self.refused(2, "--context 0: 1 to", *words, "--context", 0)
        self.refused(2, "--context -5: 1 to", *words, "--context", -5)
        self.refused(2, "--head-dim 513: 1 to 512", *words, "--head-dim", 513)
        self.refused(2, "--query-rows 9: 1 to 8", *words, "--context", 8, "--query-rows", 9)
        self.refused(2, "--batch 0: 1 to", *words, "--batch", 0)
        self.refused(2, "--context 16777216: .*memory", *words, "--batch", 1024, "--context", 16777216)
        self.refused(2, "--accuracy great: exact or fast", *words, "--accuracy", "great")
        self.refused(2, "--rounds -1: 0 to", *words, "--rounds", -1)
        self.refused(2, "--working-set -1", *words, "--working-set", -1)
        self.refused(2, "kivi", "bench", "attend", "--cache", "kivy")
        self.refused(2, "twice", *words, "--cache", "mixkvq")
        self.refused(2, "--cache", "bench", "attend")
        self.refused(2, "--baseline ggml:q9: one of ggml:f16", *words, "--baseline", "ggml:q9")
        self.refused(2, "--baseline ggml:f16: is given twice", *words, "--baseline", "ggml:f16", "--baseline", "ggml:f16")
        self.refused(2, "--baseline ggml:q4_0.*--head-dim.*32, not 80", *words, "--head-dim", 80, "--baseline", "ggml:q4_0")
        self.refused(1, "--device cuda.*(without the GPU backend|has no GPU|runs none)", *words, "--device", "cuda")
        self.refused(2, "--baseline ggml:f16: on a GPU", *words, "--device", "cuda", "--baseline", "ggml:f16")
        self.refused(2, "--accuracy fast: the kernels of a GPU", *words, "--device", "cuda", "--accuracy", "fast")
        self.refused(2, "--device abacus: cpu or cuda", *words, "--device", "abacus")
        self.refused(2, "mine.json.*--force", *words, "--json", self.path("mine.json", "mine"))
        self.refused(2, "subcommand", "bench")


class BenchEncode(Case):
    needs_model = False

    def test_rows_have_all_fields(self):
        got = self.good("bench", "encode", *SMALL, "--cache", "kivi:bits=2", "--cache", "mixkvq", "--cache", "pnmix", "--cache",
                        "turboquant", "--json", "-").json()
        self.assertEqual(got["kind"], "kvmosaic bench encode 1")
        self.assertEqual([(r["spec"], r["side"]) for r in got["rows"]],
                         [(s, side) for s in ["kivi:bits=2", "mixkvq", "pnmix", "turboquant"] for side in ["key", "value", "both"]])
        for row in got["rows"]:
            self.assertLessEqual(FIELDS | {"side", "ns_value", "attend_us", "share"}, set(row))
            values = 128 * 64 * (2 if row["side"] == "both" else 1)
            self.assertAlmostEqual(row["ns_value"], row["median_us"] * 1e3 / values)
            self.assertAlmostEqual(row["share"], row["median_us"] / row["attend_us"])
            self.assertTrue(0 < row["bytes"] < values * 2, row)
            self.assertEqual((row["heads"], row["kv_heads"], row["threads"]), (3, 1, 1))
        table = self.good("bench", "encode", *SMALL, "--cache", "kivi:bits=2").out
        self.assertIn("ns/value", table)

    def test_bad_usage(self):
        self.refused(2, "--cache f16: packs nothing", "bench", "encode", "--cache", "f16")
        self.refused(2, "--context 0: 1 to", "bench", "encode", "--cache", "mixkvq", "--context", 0)
        self.refused(2, "--device cuda", "bench", "encode", "--cache", "mixkvq", "--device", "cuda")


if __name__ == "__main__":
    raise SystemExit(main(BenchAttend, BenchEncode))
