"""scripts/llama.sh up to its download, with a stand-in for pip."""
import hashlib
import os
import shutil
import subprocess
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
SCRIPT = os.path.join(ROOT, "scripts", "llama.sh")
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


class Llama(unittest.TestCase):
    def setUp(self):
        self.base = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.base)
        self.index = os.path.join(self.base, "index")
        os.mkdir(self.index)
        self.env = dict(os.environ, XDG_CACHE_HOME=os.path.join(self.base, "cache"), FAKE_PIP_INDEX=self.index,
                        PYTHONPATH=os.path.join(HERE, "fake"), FAKE_PIP_LOG=os.path.join(self.base, "log"),
                        PYTHONDONTWRITEBYTECODE="1")

    def run_script(self, *args, **env):
        return subprocess.run(["bash", SCRIPT, *args], env=dict(self.env, **env), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)

    def one_sentence(self, run, *words):
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
        for word in words:
            self.assertIn(word, run.stderr)

    def test_print_dir_creates_nothing(self):
        run = self.run_script("--print-dir")
        digest = hashlib.sha256()
        for name in ("src/llama/seam.h", "cmake/apply_seam.cmake"):
            with open(os.path.join(ROOT, name), "rb") as f:
                digest.update(f.read())
        want = os.path.join(self.base, "cache", "kvmosaic", "llama.cpp-0.3.36-" + digest.hexdigest()[:12])
        self.assertEqual((run.returncode, run.stdout), (0, want + "\n"))
        self.assertFalse(os.path.exists(os.path.join(self.base, "cache")))

    def test_no_network(self):
        self.one_sentence(self.run_script(FAKE_PIP_FAIL="llama-cpp-python:Retrying: NewConnectionError"), "no network")

    def test_wrong_checksum_found_here(self):
        with open(os.path.join(self.index, "llama_cpp_python-0.3.36.tar.gz"), "wb") as f:
            f.write(b"something else")
        self.one_sentence(self.run_script(), SHA256, hashlib.sha256(b"something else").hexdigest())

    def test_wrong_checksum_found_by_pip(self):
        log = "llama-cpp-python:ERROR: DO NOT MATCH\n        Expected sha256 %s\n             Got        %s\n"
        self.one_sentence(self.run_script(FAKE_PIP_FAIL=log % (SHA256, "0" * 64)), SHA256, "0" * 64)

    def test_full_disk(self):
        message = "llama-cpp-python:ERROR: [Errno 28] No space left on device"
        self.one_sentence(self.run_script(FAKE_PIP_FAIL=message), "is full")

    def test_missing_tools(self):
        tools = os.path.join(self.base, "bin")  # a machine without compiler and ninja
        os.mkdir(tools)
        for name in ("bash", "cat", "cmake", "cut", "dirname", "flock", "python3", "sed", "sha256sum", "tar"):
            os.symlink(os.path.realpath(shutil.which(name)), os.path.join(tools, name))
        self.one_sentence(self.run_script(PATH=tools), "missing: ninja, c++", "apt-get install ninja-build g++")

    def test_unknown_option(self):
        self.assertEqual(self.run_script("--nonsense").returncode, 1)


if __name__ == "__main__":
    unittest.main()
