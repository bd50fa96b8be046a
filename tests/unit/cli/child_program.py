"""A child for the supervisor's tests: `python -m tests.unit.cli.child_program --mode MODE [--listen ADDRESS]`.

It logs as our programs do. With --runtime-dir it claims the name "child" there; with --replace it waits for that.
"""
# ruff: noqa: T201 - a program that prints

import argparse
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagekeeper.common.logging import configure_logging
from pagekeeper.common.sockets import RuntimeDir

LIMIT_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    parser.add_argument("--listen", default="")
    parser.add_argument("--runtime-dir", type=Path)
    parser.add_argument("--replace", action="store_true")
    args = parser.parse_args()
    configure_logging("child")
    print("pid", os.getpid(), "listen", args.listen, flush=True)
    if args.mode == "refuse" or (args.mode == "refuse-to-replace" and args.replace):
        print("child: pool_size: too small", file=sys.stderr)
        sys.exit(2)
    if args.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.mode == "chatty":
        print("x" * 2**21, flush=True)
    if args.mode == "late" or (args.mode == "late-to-replace" and args.replace):
        threading.Event().wait()
    if args.runtime_dir:
        RuntimeDir(args.runtime_dir).claim("child", LIMIT_S if args.replace else 0.0)
    listen = args.listen.replace(":0", ":4711")
    if args.mode == "answer":
        server, listen = answer_for_health(args.listen)
        server.start()
    print(json.dumps({"event": "ready", "level": "info", "listen": listen}), flush=True)
    threading.Event().wait()


def answer_for_health(listen: str) -> tuple[grpc.Server, str]:
    """That it is bad. The server, and its address."""

    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(listen)
    return server, f"{listen.rpartition(':')[0]}:{port}"


main()
