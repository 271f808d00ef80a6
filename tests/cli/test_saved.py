#!/usr/bin/env python3
"""run --save and --load, inspect FILE, and the server's slots, on the real model. See support.py."""
import os
import re
import urllib.error

from served import ServedCase, Server
from support import Case, PROGRAM, main, sample

LOADED = re.compile(r"\| (\d+) of (\d+) rows from (\S+)$", re.M)


class Saved(Case):
    def run_tiny(self, *words, **more):
        return self.good("run", "-m", "tiny", "--temp", 0, *words, **more)

    def test_an_answer_goes_on_where_it_was_cut(self):
        text = self.path("text.txt", sample(1300)) # some 400 tokens, so that pages are packed
        for spec in ("kivi:bits=2", "mixkvq", "innerq"):
            file = self.path("cut-%s.kv" % spec.split(":")[0])
            words = ["-f", text, "--raw", "--cache", spec]
            whole = self.run_tiny(*words, "-n", 24).out[:-1] # without the newline behind an answer
            first = self.run_tiny(*words, "-n", 10, "--save", file)
            self.assertRegex(first.err, r"saved \d+ rows to \S+ \([\d.]+ MiB\)")
            self.assertIsNone(LOADED.search(first.err))
            second = self.run_tiny("--load", file, "-n", 14, "--json", "-")
            got = second.json()
            self.assertEqual(first.out[:-1] + got["text"], whole, spec)
            self.assertEqual(got["prompt_tokens"], 1, "only the token that was not in the cache is read")
            self.assertGreater(got["loaded_tokens"], 300)
            self.assertEqual(got["cache_tokens"], got["loaded_tokens"] + 14)
            loaded, rows, name = LOADED.search(second.err).groups()
            self.assertEqual((int(loaded), int(rows), name), (got["loaded_tokens"], got["cache_tokens"], file))
            self.assertEqual(got["spec"].split(":")[0], spec.split(":")[0], "the file knows its method")

    def test_a_conversation_goes_on_without_reading_it_again(self):
        chat, lines = self.path("chat.kv"), ["My name is Ada and I like bees.", "What do I like?"]
        words = ["--chat", "--cache", "kivi:bits=4", "-n", 40]
        whole = self.run_tiny(*words, "--json", "-", stdin="\n".join(lines) + "\n").json()
        first = self.run_tiny(*words, "--save", chat, "--json", "-", stdin=lines[0] + "\n").json()
        second = self.run_tiny("--load", chat, "-p", lines[1], "-n", 40, "--json", "-")
        self.assertEqual(first["text"] + second.json()["text"], whole["text"])
        self.assertGreater(second.json()["loaded_tokens"], 30)
        self.assertLess(second.json()["prompt_tokens"], 25)
        # The same file, extended in place by --chat.
        third = self.run_tiny("--load", chat, "--chat", "-n", 40, "--save", chat, "--force", "--json", "-",
                              stdin=lines[1] + "\n").json()
        self.assertEqual(third["text"], second.json()["text"])
        shown = self.good("inspect", chat, "--json").json()
        self.assertEqual(shown["sequences"][0]["rows"], third["cache_tokens"])

    def test_text_is_appended(self):
        file = self.path("append.kv")
        self.run_tiny("-p", "One two three", "--raw", "-n", 0, "--save", file, "--cache", "f16")
        apart = self.run_tiny("--load", file, "-p", " four five", "-n", 8, "--json", "-").json()
        whole = self.run_tiny("-p", "One two three four five", "--raw", "-n", 8, "--cache", "f16", "--json", "-").json()
        self.assertEqual(apart["text"], whole["text"])
        self.assertEqual(apart["loaded_tokens"] + apart["prompt_tokens"], whole["prompt_tokens"])
        self.refused(2, "had ended", "run", "-m", "tiny", "--load", file)

    def test_refusals_name_what_is_wrong(self):
        file, other = self.path("a.kv"), self.path("b.kv")
        self.run_tiny("-p", "Hello", "--raw", "-n", 4, "--save", file, "--cache", "kivi:bits=2")
        with open(file, "rb") as f:
            bytes_ = f.read()
        self.refused(2, "--save.*exists already.*--force", "run", "-m", "tiny", "-p", "x", "--save", file)
        with open(file, "rb") as f:
            self.assertEqual(f.read(), bytes_)
        self.refused(1, "spec.*kivi", "run", "-m", "tiny", "--load", file, "--cache", "mixkvq", "-p", "x")
        self.refused(2, "no conversation", "run", "-m", "tiny", "--load", file, "--chat")
        self.refused(2, "--compress", "run", "-m", "tiny", "-p", "x", "--compress")
        self.refused(2, "does not exist", "run", "-m", "tiny", "-p", "x", "--save", self.path("none") + "/x.kv")
        for at, word in ((0, "magic"), (8, "version"), (12, "byte order"), (16, "page size"), (60, "checksum"),
                         (len(bytes_) - 9, "checksum")):
            bad = bytearray(bytes_)
            bad[at] ^= 3
            with open(other, "wb") as f:
                f.write(bad)
            self.refused(1, "b.kv.*" + word, "inspect", other)
            self.refused(1, "b.kv.*" + word, "run", "-m", "tiny", "--load", other, "-p", "x")
        with open(other, "wb") as f:
            f.write(bytes_[:-1])
        self.refused(1, "length", "inspect", other)
        self.refused(1, "cannot be read", "inspect", self.path("missing.kv"))
        self.refused(2, "excludes", "inspect", file, "-m", "tiny")

    def test_inspect_tells_bytes_by_part(self):
        text, file, small = self.path("text2.txt", sample(2000)), self.path("i.kv"), self.path("small.kv")
        run = self.run_tiny("-f", text, "--raw", "-n", 4, "--save", file, "--cache", "mixkvq", "--json", "-").json()
        got = self.good("inspect", file, "--json").json()
        self.assertEqual(got["file_bytes"], os.path.getsize(file))
        self.assertEqual(got["file_bytes"], 40 + sum(s["stored"] + 48 * s["count"] for s in got["sections"]))
        self.assertEqual(got["tokens"], run["cache_tokens"])
        self.assertEqual(got["sequences"][0]["tokens"], run["cache_tokens"] + 1)
        self.assertEqual(sum(p["bytes"] for p in got["parts"]), got["cache_bytes"])
        self.assertAlmostEqual(got["true_bits"], run["true_bits"], delta=0.1)
        self.assertRegex(got["fingerprint"], "^[0-9a-f]{16}$")
        layer = got["sequences"][0]["layers"][0]
        self.assertEqual(layer["keys"]["packed"] + layer["keys"]["window_front"] <= run["cache_tokens"], True)
        self.assertGreater(layer["keys"]["pages"], 0)
        out = self.good("inspect", file).out
        for word in ("sequence file, version 1", "mixkvq", "packed keys", "statistics", "true bits per value", "keys"):
            self.assertIn(word, out)
        self.run_tiny("-f", text, "--raw", "-n", 4, "--save", small, "--compress", "--cache", "mixkvq")
        self.assertLess(os.path.getsize(small), os.path.getsize(file))
        again = self.run_tiny("--load", small, "-n", 3, "--json", "-").json()
        self.assertEqual(again["text"], self.run_tiny("--load", file, "-n", 3, "--json", "-").json()["text"])


class SavedSlots(Case, ServedCase):
    """The server saves a slot, forgets it, restores it and reads nothing again."""

    def test_slots_come_back(self):
        words = ["-m", "tiny", "--cache", "kivi:bits=4", "--ctx", 2048, "-np", 2, "-t", 2, "--slot-save-path",
                 self.folder + "/"]
        server = self.serve(PROGRAM, lambda log: Server(PROGRAM, words, log))
        try:
            ask = {"prompt": sample(1300), "n_predict": 12, "temperature": 0, "cache_prompt": True, "id_slot": 0}
            first = server.good("/completion", ask)
            self.assertGreater(first["timings"]["prompt_n"], 300)
            saved = server.good("/slots/0?action=save", {"filename": "slot.bin"})
            self.assertGreater(saved["n_saved"], 300)
            server.good("/slots/0?action=erase", {})
            restored = server.good("/slots/1?action=restore", {"filename": "slot.bin"})
            self.assertEqual(restored["n_restored"], saved["n_saved"])
            again = server.good("/completion", dict(ask, id_slot=1))
            self.assertEqual(again["content"], first["content"])
            self.assertLess(again["timings"]["prompt_n"], 5, "the restored rows are used")
            # A damaged file is an error, and the server goes on.
            with open(self.path("slot.bin"), "r+b") as f:
                f.seek(-200, os.SEEK_END)
                f.write(b"x" * 100)
            with self.assertRaises(urllib.error.HTTPError):
                server.good("/slots/0?action=restore", {"filename": "slot.bin"})
            self.assertEqual(server.good("/completion", dict(ask, id_slot=1))["content"], first["content"])
        finally:
            code = server.stop()
        self.assertEqual(code, 0, "SIGINT stops the server cleanly")


if __name__ == "__main__":
    raise SystemExit(main(Saved, SavedSlots))
