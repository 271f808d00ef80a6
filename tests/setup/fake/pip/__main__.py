"""A stand-in for pip: `download` copies files from the folder FAKE_PIP_INDEX instead of the network.

FAKE_PIP_LOG collects the requested packages, one a line. FAKE_PIP_FAIL=PACKAGE:MESSAGE makes one request fail.
"""
import os
import shutil
import sys


def main():
    args = sys.argv[1:]
    if args == ["--version"]:
        print("pip 0 (stand-in)")
        return 0
    assert args[0] == "download", args
    out = args[args.index("-d") + 1]
    if "-r" in args:
        with open(args[args.index("-r") + 1]) as f:
            wanted = f.read().split()[0]
    else:
        wanted = args[-1]
    with open(os.environ["FAKE_PIP_LOG"], "a") as log:
        log.write(wanted + "\n")
    package, version = wanted.split("==")
    fail, _, message = os.environ.get("FAKE_PIP_FAIL", "").partition(":")
    if fail == package:
        print(message, file=sys.stderr)
        return 1
    os.makedirs(out, exist_ok=True)
    prefix = "%s-%s" % (package.replace("-", "_"), version)
    for name in os.listdir(os.environ["FAKE_PIP_INDEX"]):
        if name.startswith(prefix + "-") or name.startswith(prefix + ".tar"):
            shutil.copy(os.path.join(os.environ["FAKE_PIP_INDEX"], name), out)
            return 0
    print("ERROR: No matching distribution found for %s" % wanted, file=sys.stderr)
    return 1


sys.exit(main())
