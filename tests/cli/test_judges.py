"""llama.cpp's own tools on our cache: independent judges. Label "cli"; needs the tools beside the program.

What is compared: llama.cpp's perplexity tool with its own f32 cache against the same tool on ours, on weights
dequantized to F32; our `compare --step chunk` against that tool; a chat request to the server.
"""
import glob
import json
import os
import random
import re
import unittest

import serve_load
from served import ServedCase, Server
from support import CACHE, PROGRAM, SAMPLE, TINY, Case, call, main, sample

TOOLS = os.path.dirname(PROGRAM)
SPEC = "KVMOSAIC_CACHE"


def tool(name):
    return os.path.join(TOOLS, name)


def number(pattern, text):
    found = re.findall(pattern, text)
    return float(found[-1]) if found else None


class Judge(Case):
    """Runs of llama-perplexity. The text and the windows are the same everywhere: 2 windows of 512, second half scored."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not os.path.exists(tool("llama-perplexity")):
            raise unittest.SkipTest("llama-perplexity is not built (target llama-tools)")
        cls.text = os.path.join(cls.folder, "text.txt")
        with open(cls.text, "w") as file:
            file.write(sample(6000))
        for weights in ("f16", "f32"):  # compare makes the files once and keeps them
            done = call("compare", "-m", "tiny", "-f", cls.text, "--weights", weights, "--tokens", 32, "--score-from", 8,
                        "--cache", "f16")
            assert done.code == 0, done.err

    def weights(self, kind):
        with open(TINY, "rb") as file:
            import hashlib
            digest = hashlib.sha256(file.read()).hexdigest()
        found = glob.glob(os.path.join(CACHE, "weights", digest + "-" + kind + ".gguf"))
        self.assertEqual(len(found), 1, "the dequantized weights lie in the cache folder")
        return found[0]

    def judge(self, kind, *more, spec=None, step="decode", own=()):
        env = {SPEC: spec, "KVMOSAIC_STEP": step} if spec else {}
        done = call("-m", self.weights(kind), "-f", self.text, "-c", 512, "-b", 512, "-ub", 512, "--chunks", 2, "-t", 2,
                    *own, *more, program=tool("llama-perplexity"), env=env)
        self.assertEqual(done.code, 0, done.err[-2000:])
        if spec:  # a foreign tool says on whose cache it runs
            self.assertRegex(done.err, "kvmosaic.*" + re.escape(spec.split(":")[0]))
        return done.out + done.err


class Parity(Judge):
    STOCK = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")

    def test_f16_and_f32_against_the_stock_f32_cache(self):
        base = self.path("base.kld")
        stock = self.judge("f32", "--save-all-logits", base, own=self.STOCK)
        wanted = number(r"Final estimate: PPL = ([0-9.]+)", stock)
        for spec, bound in (("f16", 4e-4), ("f32", 1e-5)):
            ours = self.judge("f32", "--kl-divergence", "--kl-divergence-base", base, spec=spec)
            self.assertLess(number(r"Mean\s+KLD:\s+(-?[0-9.e-]+)", ours), bound, spec)
            self.assertGreater(number(r"Same top p:\s+([0-9.]+)", ours), 99, spec)
            self.assertAlmostEqual(number(r"Mean PPL\(Q\)\s*:\s+([0-9.]+)", ours) / wanted, 1, delta=2e-3, msg=spec)

    def test_a_worse_cache_is_seen(self):
        base = self.path("seen.kld")
        self.judge("f32", "--save-all-logits", base, own=self.STOCK)
        ours = self.judge("f32", "--kl-divergence", "--kl-divergence-base", base, spec="kivi:bits=2,residual=32")
        self.assertGreater(number(r"Mean\s+KLD:\s+(-?[0-9.e-]+)", ours), 1e-3)


class ChunkSteps(Judge):
    def test_compare_agrees_with_the_perplexity_tool(self):
        """--step chunk, the same windows, ubatch and scored half: perplexity and KL agree to 1 %."""
        base, spec = self.path("f16.kld"), "kivi:bits=2,residual=32"
        f16 = self.judge("f16", "-ub", 128, "--save-all-logits", base, spec="f16", step="chunk")
        judged = self.judge("f16", "-ub", 128, "--kl-divergence", "--kl-divergence-base", base, spec=spec, step="chunk")
        rows = self.good("compare", "-m", "tiny", "-f", self.text, "--window", 512, "--windows", 2, "--score-from", 257,
                         "--ubatch", 128, "--step", "chunk", "--cache", spec, "--json", "-").json()["rows"]
        rows = {row["spec"]: row for row in rows}
        self.assertAlmostEqual(rows["f16"]["ppl"] / number(r"Final estimate: PPL = ([0-9.]+)", f16), 1, delta=0.01)
        self.assertAlmostEqual(rows[spec]["ppl"] / number(r"Mean PPL\(Q\)\s*:\s+([0-9.]+)", judged), 1, delta=0.01)
        self.assertAlmostEqual(rows[spec]["kl_mean"] / number(r"Mean\s+KLD:\s+(-?[0-9.e-]+)", judged), 1, delta=0.01)


class Bench(Case):
    def test_llama_bench_runs_on_our_cache(self):
        if not os.path.exists(tool("llama-bench")):
            self.skipTest("llama-bench is not built")
        done = call("-m", TINY, "-p", 64, "-n", 4, "-r", 1, "-t", 2, "-o", "json", program=tool("llama-bench"),
                    env={SPEC: "mixkvq"})
        self.assertEqual(done.code, 0, done.err)
        self.assertEqual(len(json.loads(done.out)), 2)
        wrong = call("-m", TINY, "-p", 8, "-n", 0, "-r", 1, program=tool("llama-bench"), env={SPEC: "kivi:bits=5"})
        self.assertNotEqual(wrong.code, 0)
        self.assertRegex(wrong.err, "bits")


class Serve(Case, ServedCase):
    """`kvmosaic serve` on loopback: chat requests, a follow-up that reuses its prompt, and a clean stop."""

    def test_chat_over_http(self):
        words = ["-m", "tiny", "--cache", "mixkvq", "--ctx", 1024, "-np", 2, "-t", 2]
        server = self.serve(PROGRAM, lambda log: Server(PROGRAM, words, log))
        try:
            messages = [{"role": "system", "content": "You answer in one short sentence. " * 12},
                        {"role": "user", "content": "What is the capital of France?"}]
            chat = {"messages": messages, "temperature": 0, "max_tokens": 24, "cache_prompt": True}
            first = server.good("/v1/chat/completions", chat)
            text = first["choices"][0]["message"]["content"]
            self.assertRegex(text, "[A-Za-z]{3}")
            again = server.good("/v1/chat/completions", chat)
            self.assertGreater(again.get("timings", {}).get("cache_n", 0), 50, again)  # the prompt was reused
            self.assertRegex(self.said(), "kvmosaic.*mixkvq")
        finally:
            code = server.stop()
        self.assertEqual(code, 0, "SIGINT stops the server cleanly")


class ServeLoad(Case, ServedCase):
    """Conversations side by side, each with words of its own (serve_load.py); a full cache; memory; contexts shifted."""

    def start(self, spec, slots, slot_tokens, *more):
        return self.serve(PROGRAM, lambda log: serve_load.LoadServer(PROGRAM, "tiny", spec, slots, slot_tokens, log, more))

    def test_no_word_leaves_its_conversation(self):
        slots, tokens = 4, 512
        server = self.start("kivi:bits=4", slots, tokens)
        try:
            words = serve_load.pairs(64, 3)
            serve_load.run(server, 0, slots, slots, tokens, 3, words)
            server.erase_slots(slots)
            before = server.resident_mib()
            result = serve_load.run(server, slots, 8, slots, tokens, 3, words)
            self.assertEqual(result["leaks"], [])
            self.assertEqual(result["refused"], [])
            self.assertGreaterEqual(result["found"], 0.85 * result["requests"], result)
            status, reply, after = serve_load.too_long(server, tokens)
            self.assertEqual(status, 400, reply)
            self.assertRegex(reply, "exceed")
            self.assertEqual(after, 200)
            server.erase_slots(slots)
            self.assertLess(server.resident_mib(), before + 24)
        finally:
            self.stop(server)

    def test_a_full_budget_refuses_and_recovers(self):
        server = self.start("f16", 2, 1024, "--budget", "12")  # some 540 rows of this model in all
        try:
            rng = random.Random(5)
            long = {"prompt": serve_load.filler(rng, 800), "n_predict": 2, "cache_prompt": True}
            status, reply = server.post("/completion", long)
            self.assertNotEqual(status, 200, reply)
            self.assertIn("error", reply)
            short = dict(long, prompt=serve_load.filler(rng, 250))
            for _ in range(3):
                status, reply = server.post("/completion", short)
                self.assertEqual(status, 200, reply)
        finally:
            self.stop(server)

    def test_choices_fork_and_slots_are_saved(self):
        server = self.start("kivi:bits=4", 3, 512)
        try:
            chat = {"messages": [{"role": "user", "content": serve_load.filler(random.Random(7), 200) + "Go on."}],
                    "temperature": 0, "max_tokens": 8, "n": 3}
            status, reply = server.post("/v1/chat/completions", chat)
            self.assertEqual(status, 200, reply)
            self.assertEqual(len({choice["message"]["content"] for choice in reply["choices"]}), 1)
            self.assertEqual(sorted(choice["index"] for choice in reply["choices"]), [0, 1, 2])
            self.assertLess(reply["usage"]["prompt_tokens"], 400)

            body = {"prompt": serve_load.filler(random.Random(8), 250), "n_predict": 8, "temperature": 0, "id_slot": 1,
                    "cache_prompt": True}
            _, first = server.post("/completion", body)
            status, saved = server.post("/slots/1?action=save", {"filename": "slot"})
            self.assertEqual(status, 200, saved)
            server.erase_slots(3)
            status, back = server.post("/slots/1?action=restore", {"filename": "slot"})
            self.assertEqual(status, 200, back)
            self.assertEqual(back["n_restored"], saved["n_saved"])
            _, again = server.post("/completion", body)
            self.assertGreater(again["timings"]["cache_n"], 200)
            self.assertLessEqual(again["timings"]["prompt_n"], 8)
            self.assertEqual(again["content"][:12], first["content"][:12])
        finally:
            self.stop(server)

    def test_contexts_shift_while_quantized(self):
        server = self.start("kivi:bits=4", 1, 256, "--context-shift", "--keep", "16", "--rollback", "32")
        try:
            body = {"prompt": serve_load.filler(random.Random(6), 150), "n_predict": 300, "ignore_eos": True,
                    "temperature": 0.8, "seed": 1}
            status, reply = server.post("/completion", body)
            self.assertEqual(status, 200, reply)
            self.assertEqual(reply["tokens_predicted"], 300)  # more than fit without a shift
            self.assertTrue(reply["truncated"], reply)
            self.assertNotRegex(self.said(), "were not moved")
        finally:
            self.stop(server)


if __name__ == "__main__":
    raise SystemExit(main(Parity, ChunkSteps, Bench, Serve, ServeLoad))
