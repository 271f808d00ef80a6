"""A `kvmosaic serve` on loopback for as long as a test needs one."""
import json
import os
import signal
import socket
import subprocess
import time
import unittest
import urllib.error
import urllib.request


class Server:
    """words: what stands behind `serve`, but for the port. log: an open file."""

    def __init__(self, program, words, log, env=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen([program, "serve", *map(str, words), "--port", str(self.port)], stdout=log,
                                        stderr=log, stdin=subprocess.DEVNULL,
                                        env=dict(os.environ, OMP_WAIT_POLICY="passive", **(env or {})))
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError("the server ended by itself")
            try:
                if self.get("/health").get("status") == "ok":
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError("the server did not come up")

    def url(self, path):
        return "http://127.0.0.1:%d%s" % (self.port, path)

    def get(self, path):
        with urllib.request.urlopen(self.url(path), timeout=300) as reply:
            return json.loads(reply.read())

    def open(self, path, body):
        request = urllib.request.Request(self.url(path), json.dumps(body).encode(), {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=900)

    def good(self, path, body):
        """The reply; HTTPError for a refusal."""
        with self.open(path, body) as reply:
            return json.loads(reply.read())

    def post(self, path, body):
        """(status, reply), also for refusals."""
        try:
            return 200, self.good(path, body)
        except urllib.error.HTTPError as bad:
            return bad.code, json.loads(bad.read() or b"{}")

    def erase_slots(self, slots):
        for slot in range(slots):
            status, reply = self.post("/slots/%d?action=erase" % slot, {})
            assert status == 200, reply

    def resident_mib(self):
        with open("/proc/%d/status" % self.process.pid) as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

    def stop(self):
        """Exit code after SIGINT; None when it had to be killed."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None


class ServedCase:
    """Beside Case: servers that end with the test."""

    def serve(self, program, make):
        """make(log) starts it."""
        if not os.path.exists(os.path.join(os.path.dirname(program), "llama-server")):
            raise unittest.SkipTest("llama-server is not built (make server)")
        self.log = open(self.path("server-%s.log" % self.id()), "w+")
        self.addCleanup(self.log.close)
        return make(self.log)

    def said(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read()

    def stop(self, server):
        if server.process.poll() is None:
            self.assertEqual(server.stop(), 0, "SIGINT stops the server cleanly")
