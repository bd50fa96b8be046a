"""A child for the supervisor's tests: `python -m tests.unit.cli.child_program --mode MODE [--listen ADDRESS]`."""
# ruff: noqa: T201 - a program that prints

import argparse
import json
import os
import signal
import sys
import threading


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    parser.add_argument("--listen", default="")
    args = parser.parse_args()
    print("pid", os.getpid(), "listen", args.listen, flush=True)
    if args.mode == "refuse":
        print("child: pool_size: too small", file=sys.stderr)
        sys.exit(2)
    if args.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.mode == "chatty":
        print("x" * 2**21, flush=True)
    print(json.dumps({"event": "ready", "level": "info", "listen": args.listen.replace(":0", ":4711")}), flush=True)
    threading.Event().wait()


main()
