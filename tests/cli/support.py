"""The real kvmosaic program, one process a case: what a user types and sees.

The test files take names of classes as arguments and need KVMOSAIC_PROGRAM and KVMOSAIC_SOURCE_DIR. Exit code 77:
nothing could run because the model is not fetched or a tool is not built.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = os.environ.get("KVMOSAIC_PROGRAM", "")
SOURCE = os.environ.get("KVMOSAIC_SOURCE_DIR", "")
CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvmosaic")
TINY = os.path.join(CACHE, "models", "tiny.gguf")
SAMPLE = os.path.join(SOURCE, "data", "sample.txt")


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def json(self):
        return json.loads(self.out)


def call(*words, stdin="", env=None, program=None):
    # Waiting threads of libgomp burn the time that they wait for when tests share their cores.
    env = {"OMP_WAIT_POLICY": "passive", **(env or {})}
    done = subprocess.run([program or PROGRAM, *map(str, words)], input=stdin, capture_output=True, text=True,
                          timeout=580, env=dict(os.environ, **env), errors="replace")
    return Result(done)


class Case(unittest.TestCase):
    needs_model = True

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="kvmosaic-cli-")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def path(self, name, text=None):
        path = os.path.join(self.folder, name)
        if text is not None:
            with open(path, "w") as file:
                file.write(text)
        return path

    def good(self, *words, **more):
        result = call(*words, **more)
        self.assertEqual(result.code, 0, "%s\n%s" % (words, result.err))
        return result

    def refused(self, code, pattern, *words, **more):
        """One sentence on stderr that says `pattern`, nothing on stdout, and the exit code."""
        result = call(*words, **more)
        self.assertEqual(result.code, code, "%s\n%s" % (words, result.err))
        self.assertEqual(result.out, "")
        lines = result.err.strip().splitlines()
        self.assertEqual(len(lines), 1, result.err)
        self.assertTrue(lines[0].startswith("kvmosaic: error: "), lines[0])
        self.assertRegex(lines[0], pattern)


def sample(characters):
    with open(SAMPLE) as file:
        return file.read(characters)


def main(*cases):
    names = sys.argv[1:] or [case.__name__ for case in cases]
    if not os.path.exists(PROGRAM) or not os.path.exists(SAMPLE):
        print("set KVMOSAIC_PROGRAM and KVMOSAIC_SOURCE_DIR")
        return 1
    suite, loader = unittest.TestSuite(), unittest.TestLoader()
    for case in (case for case in cases if case.__name__ in names):
        if case.needs_model and not os.path.exists(TINY):
            print("skipped: %s needs the model 'tiny' (kvmosaic fetch tiny)" % case.__name__)
            return 77
        suite.addTests(loader.loadTestsFromTestCase(case))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    if result.wasSuccessful() and result.skipped and len(result.skipped) >= result.testsRun:
        return 77
    return 0 if result.wasSuccessful() and result.testsRun > 0 else 1
