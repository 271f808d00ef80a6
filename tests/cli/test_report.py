#!/usr/bin/env python3
"""Reports: pages of compare and report, KL by layer, channels. See support.py."""
import json
import os
import shutil
import unittest
import xml.etree.ElementTree as ElementTree

from support import Case, SAMPLE, main

GNUPLOT = shutil.which("gnuplot")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class Page:
    """A page as a strict parser sees it."""

    def __init__(self, text):
        self.text = text
        self.root = ElementTree.fromstring(text.split("\n", 1)[1])  # without the doctype

    def all(self, tag):
        return [e for e in self.root.iter() if e.tag.split("}")[-1] == tag]

    def words(self, tag):
        return ["".join(e.itertext()) for e in self.all(tag)]


class Shapes(Case):
    def sound(self, text):
        """Well-formed, and complete without anything from elsewhere."""
        self.assertTrue(text.startswith("<!DOCTYPE html>\n"))
        page = Page(text)
        names = set()
        for element in page.root.iter():
            self.assertNotIn(element.tag.split("}")[-1], {"script", "link", "iframe", "object", "embed", "audio", "video"})
            for name, value in element.attrib.items():
                if name.split("}")[-1] in ("href", "src"):
                    self.assertRegex(value, r"^(#|data:image/png;base64,)")
                if name == "id":
                    self.assertNotIn(value, names, "an identifier is there twice")
                    names.add(value)
        self.assertNotRegex(text, r"url\(\s*['\"]?(?!#)|@import")
        return page


@unittest.skipUnless(GNUPLOT, "gnuplot is not installed")
class Pages(Shapes):
    def test_a_comparison_as_a_page_and_again_from_its_json(self):
        html, saved, again = self.path("page.html"), self.path("result.json"), self.path("again.html")
        words = ["compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--tokens", 300, "--cache", "mixkvq",
                 "--cache", "kivi:bits=2,group=32", "--json", saved, "--html", html]
        self.good(*words)
        result = json.loads(read(saved))
        page = self.sound(read(html))
        cells = page.words("td")
        for row in result["rows"]:
            if row["spec"] != "floor":
                for number in ("%.2f" % row["true_bits"], "%.2f" % row["true_bits_32k"], "%.4f" % row["ppl_ratio"]):
                    self.assertIn(number, cells)
            if row["spec"] not in ("f16", "floor"):
                self.assertTrue(any(cell.startswith("%.5f ± " % row["kl_mean"]) for cell in cells), row)
        everything = "".join(page.root.itertext())
        for text in (result["model_sha256"], result["text_sha256"], result["commit"], result["machine"], result["command"]):
            self.assertIn(text, everything)
        self.assertIn("--cache kivi:bits=2,group=32", result["command"])
        self.assertEqual(len(page.all("figure")), 5, "everything but layers, which cost passes of their own")
        # what the plots are drawn from
        edges, tokens = result["position_edges"], result["curve_tokens"]
        self.assertEqual((edges[0], edges[-1], len(edges), tokens[0]), (150, 300, 17, 512))
        for row in result["rows"]:
            parts = row["kl_by_position"]
            mean = sum(kl * (b - a) for kl, a, b in zip(parts, edges, edges[1:])) / 150
            self.assertAlmostEqual(mean, row["kl_mean"], delta=1e-6 + 1e-4 * row["kl_mean"])
            curve = row["true_bits_curve"]
            self.assertEqual(len(curve), len(tokens))
            self.assertEqual(curve[tokens.index(8192)], row["true_bits_8k"])
            if row["spec"] not in ("f16", "floor"):
                self.assertEqual(curve, sorted(curve, reverse=True))
                f16 = result["rows"][0]
                self.assertAlmostEqual(row["cache_bytes_32k"] / f16["cache_bytes_32k"],
                                       row["true_bits_32k"] / f16["true_bits_32k"], places=3)
        heat = result["heat"]
        self.assertEqual((heat["tokens"], len(heat["range"]), len(heat["range"][0])), (300, 2, 64))
        self.assertEqual([c["spec"] for c in heat["caches"]], ["mixkvq"], "KIVI has one width")
        self.assertLessEqual({bits for page in heat["caches"][0]["bits"] for bits in page}, {2, 4, 16})
        for salience, a, b in zip(heat["salience"][1], heat["range"][1], heat["query"][1]):
            self.assertAlmostEqual(salience / (a * b), 1, delta=2e-3)
        self.good("report", saved, "--html", again)
        self.assertEqual(read(again), read(html))
        self.refused(2, "page.html.*--force", *words[:-4], "--html", html)
        self.refused(2, "heat 30:0: layer 0 to 29", *words[:-4], "--heat", "30:0")
        self.refused(2, "heat 3:3: KV head 0 to 2", *words[:-4], "--heat", "3:3")
        self.refused(2, "heat 3.5: auto, off or LAYER:HEAD", *words[:-4], "--heat", "3.5")


@unittest.skipUnless(GNUPLOT, "gnuplot is not installed")
class Layers(Shapes):
    def test_each_layer_alone_and_not_again(self):
        progress, html = self.path("progress"), self.path("page.html")
        words = ["compare", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--window", 64, "--windows", 1, "--score-from",
                 40, "--cache", "kivi:bits=2,residual=32,group=32", "--layers", "--resume", progress]
        got = self.good(*words, "--json", "-", "--html", html).json()
        (row,) = got["layers"]["rows"]
        self.assertEqual(row["layers"], list(range(30)))
        self.assertEqual((got["layers"]["window"], got["layers"]["windows"]), (64, 1))
        whole = got["rows"][2]["kl_mean"]
        self.assertTrue(all(0 < kl < whole for kl in row["kl"]), row)
        self.assertTrue(0.1 * whole < sum(row["kl"]) < 10 * whole, (sum(row["kl"]), whole))
        page = self.sound(read(html))
        self.assertIn("KL by layer", page.words("h3"))
        with open(progress) as file:
            stored = json.load(file)
        self.assertEqual([r.get("layer") for r in stored["rows"]], [None, None, None, *range(30)])
        # A stored layer is believed, and not measured again.
        stored["rows"][3]["windows"][0]["kl"] = [2.0] * 24
        with open(progress, "w") as file:
            json.dump(stored, file)
        again = self.good(*words, "--json", "-").json()
        self.assertEqual(again["layers"]["rows"][0]["kl"], [2.0, *row["kl"][1:]])


class Channels(Case):
    def test_correlations_of_a_layer_and_of_all(self):
        words = ["eval", "channels", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is", "--tokens", 256]
        got = self.good(*words, "--json", "-").json()
        self.assertEqual([layer["layer"] for layer in got["layers"]], list(range(30)))
        for layer in got["layers"]:
            self.assertEqual(len(layer["heads"]), 3)
            for name in ("pearson", "spearman", "range_ratio", "top_share"):
                self.assertAlmostEqual(layer[name], sum(h[name] for h in layer["heads"]) / 3, places=9)
            for head in layer["heads"]:
                self.assertEqual((len(head["range"]), len(head["query"])), (64, 64))
                self.assertTrue(-1 <= head["pearson"] <= 1 and -1 <= head["spearman"] <= 1)
                self.assertGreaterEqual(head["range_ratio"], 1)
                self.assertTrue(8 / 64 < head["top_share"] < 1)
                n, x, y = 64, head["range"], head["query"]
                mx, my = sum(x) / n, sum(y) / n
                xy = sum((a - mx) * (b - my) for a, b in zip(x, y))
                xx, yy = sum((a - mx) ** 2 for a in x), sum((b - my) ** 2 for b in y)
                self.assertAlmostEqual(head["pearson"], xy / (xx * yy) ** 0.5, places=6)
        one = self.good(*words, "--layer", 7, "--json", "-").json()
        self.assertEqual(one["layers"], [got["layers"][7]])
        table = self.good(*words, "--layer", 7).out
        self.assertRegex(table, r"SHA-256 [0-9a-f]{16}")
        self.assertRegex(table, r"(?m)^256 tokens of ")
        self.assertRegex(table, r"(?m)^7  +%.3f " % got["layers"][7]["pearson"])

    def test_bad_usage(self):
        words = ["eval", "channels", "-m", "tiny", "-f", SAMPLE, "--weights", "as-is"]
        self.refused(2, "layer 30: 0 to 29", *words, "--layer", 30)
        self.refused(2, "tokens 100: at least 128", *words, "--tokens", 100)
        self.refused(2, "window 9: at least 128", *words, "--window", 9)
        self.refused(2, "tokens 99999999: 128 to", *words, "--tokens", 99999999)


class Results(Shapes):
    needs_model = False

    def result(self, name, **more):
        rows = [{"spec": s, "canonical": s, "tokens": 100, "true_bits": b, "kl_mean": k}
                for s, b, k in (("f16", 16.1, 0), ("floor", 16.1, 1e-6), ("kivi:<i>&\"'", 3.125, 0.25), ("b", 4.5, 0.125))]
        whole = {"model": "/m/<script>alert(1).gguf", "model_sha256": "ab" * 32, "text": "t&t.txt",
                 "text_sha256": "cd" * 32, "weights": "f16", "window": 64, "windows": 1, "score_from": 32, "rows": rows,
                 "commit": "c0ffee", "machine": "a machine", "version": "0.1.0", "command": "kvmosaic compare -f 't&t.txt'"}
        return self.path(name, json.dumps(dict(whole, **more)))

    @unittest.skipUnless(GNUPLOT, "gnuplot is not installed")
    def test_what_users_wrote_is_text_and_nothing_else(self):
        html, plot = self.path("page.html"), self.path("plot.svg")
        self.good("report", self.result("one.json"), self.result("two.json", window=128), "--html", html, "--plot", plot)
        page = self.sound(read(html))
        self.assertIn("kivi:<i>&\"'", page.words("code"))
        self.assertEqual(page.words("h2"), ["<script>alert(1) on t&t.txt"] * 2)
        self.assertEqual(page.all("i") + page.all("script"), [])
        self.assertEqual(len(page.all("section")), 2)
        self.assertIn("All results", page.words("h3"))
        svg = ElementTree.fromstring(read(plot))
        self.assertTrue(svg.tag.endswith("svg"))
        self.refused(2, "plot.svg.*--force", "report", self.result("one.json"), "--plot", plot)
        # One part alone.
        layers = self.result("layers.json", layers={"window": 64, "windows": 1, "rows": [
            {"spec": "kivi:<i>", "layers": [0, 1, 2], "kl": [0.1, 0.02, 0.05], "kl_error": [0.01] * 3}]})
        alone = self.path("alone.svg")
        self.good("report", layers, "--plot", alone, "--part", "layers")
        text = read(alone)
        self.assertTrue(ElementTree.fromstring(text).tag.endswith("svg"))
        self.assertIn("layer that alone is quantized", text)
        self.refused(1, "say nothing of layers; `compare --layers`", "report", self.result("one.json"), "--plot",
                     self.path("no.svg"), "--part", "layers")
        self.refused(2, "2 comparisons", "report", layers, self.result("two.json", window=128), "--plot",
                     self.path("no.svg"), "--part", "layers")
        self.refused(2, "--part layers: says what --plot", "report", layers, "--html", self.path("no.html"), "--part", "layers")
        self.refused(2, "--part", "report", layers, "--plot", self.path("no.svg"), "--part", "colours")
        broken = self.result("broken.json", layers={"rows": [{"spec": "x", "layers": 5, "kl": {}}], "window": 1, "windows": 1})
        self.refused(1, "say nothing|contradict", "report", broken, "--plot", self.path("no.svg"), "--part", "layers")
        self.assertFalse(os.path.exists(self.path("no.svg")))
        # Without the fields of newer versions the page says what is not there.
        self.assertIn("Not in this result: KL by position", read(html))

    @unittest.skipUnless(GNUPLOT, "gnuplot is not installed")
    def test_what_is_no_result_is_refused_by_file_and_field(self):
        html = self.path("none.html")
        good = self.result("good.json")
        self.refused(2, "bad.json: is not JSON", "report", good, self.path("bad.json", "{"), "--html", html)
        self.refused(2, "list.json: is not a JSON object", "report", self.path("list.json", "[]"), "--html", html)
        self.refused(2, "keys.json.*'model'", "report", self.path("keys.json", '{"kind": "kvmosaic passkey 1"}'), "--html", html)
        self.refused(2, "rows.json.*row 'x'.*'tokens'", "report", self.result("rows.json", rows=[{"spec": "x"}]), "--html", html)
        self.refused(1, "contradict", "report", self.result("kind.json", window="wide"), "--html", html)
        self.refused(2, "--html FILE or --plot FILE", "report", good)
        self.refused(1, "missing.json", "report", self.path("missing.json"), "--html", html)
        self.assertFalse(os.path.exists(html))

    def test_without_gnuplot_no_work_begins(self):
        html, empty = self.path("never.html"), {"PATH": self.folder}
        for words in (["report", self.result("one.json")], ["compare", "-m", "nowhere.gguf", "-f", "nothing", "--cache", "mixkvq"]):
            self.refused(1, "gnuplot is not installed.*gnuplot-nox", *words, "--html", html, env=empty)
        self.assertFalse(os.path.exists(html))


if __name__ == "__main__":
    raise SystemExit(main(Pages, Layers, Channels, Results))
