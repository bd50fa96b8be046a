"""The cache gives back what it lent, finds what it has seen, and keeps nobody waiting."""

import time

import grpc

from bench.promise import Outcome, Promise, Workbench, ask, ask_all, greedy
from bench.prompts import PASSAGE
from pagekeeper.cli.server import Server
from pagekeeper.client import AdminClient
from pagekeeper.common.sockets import CHANNEL_OPTIONS, RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc
from tests.golden.prompts import PROMPTS

_DRAIN_LIMIT_S = 5.0


def blocks_in_use(server: Server) -> int:
    """Blocks that are not free, once they had a few seconds to become so."""
    deadline = time.monotonic() + _DRAIN_LIMIT_S
    with AdminClient(server.admin) as admin:
        while True:
            pool = admin.stats()["pool"]
            in_use = int(pool["total_blocks"] - 1 - pool["free_blocks"])
            if not in_use or time.monotonic() > deadline:
                return in_use
            time.sleep(0.05)


def gives_everything_back(bench: Workbench) -> Outcome:
    texts = [f"{i}. {text}" for i, text in enumerate(PROMPTS[:16] * 2)]
    requests = [greedy(bench.reference.encode(text)) for text in texts]
    for request in requests:
        request.sampling["ignore_eos"] = True
    results = ask_all(bench.server, requests)
    whole = sum(len(result.candidates[0].token_ids) == 64 for result in results)
    in_use = blocks_in_use(bench.server)
    with AdminClient(bench.server.admin) as admin:
        violations = admin.audit()
    return Outcome(
        f"{whole} whole answers, {in_use} blocks in use afterwards, {len(violations)} broken invariants",
        "32, 0 and 0",
        whole == len(requests) == 32 and not in_use and not violations,
    )


def finds_a_long_prompt(bench: Workbench) -> Outcome:
    prompt = bench.reference.encode("A promise about prefixes. " + PASSAGE * 20)[:512]
    cold, warm = (ask(bench.server, greedy(prompt, max_tokens=8)) for _ in range(2))
    cached = warm.usage.cached_tokens if warm.usage else 0
    faster = (cold.ttft_s() or 0.0) / (warm.ttft_s() or 1.0)
    return Outcome(
        f"{cached} of {len(prompt)} tokens cached, first token {faster:.1f}x sooner",
        ">= 496, >= 5x",
        cached >= 496 and faster >= 5,
    )


def engine_report(bench: Workbench) -> runner_pb2.EngineReport:
    """What the shared server's runner says of its engine, asked as a gateway would."""
    socket = RuntimeDir(bench.runtime_dir).runner_sockets()[0]
    ping = runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=1))
    with grpc.insecure_channel(unix_target(socket), options=CHANNEL_OPTIONS) as channel:
        for response in runner_pb2_grpc.RunnerServiceStub(channel).Serve(iter([ping])):
            if response.HasField("pong"):
                return response.pong.engine
    raise RuntimeError("the runner did not answer a ping")


def never_waits_for_the_manager(bench: Workbench) -> Outcome:
    prompts = [bench.reference.encode(f"{i}. {text}") for i, text in enumerate(PROMPTS)]
    server = bench.server
    before = engine_report(bench)
    ask_all(server, [greedy(prompt) for prompt in prompts])
    after = engine_report(bench)
    waited = after.manager_wait_seconds - before.manager_wait_seconds
    stepped = after.step_seconds - before.step_seconds
    share = waited / stepped if stepped else 1.0
    return Outcome(f"{share:.2%} of {stepped:.1f} s of steps", "< 1%", share < 0.01)


PROMISES = [
    Promise("32 clients x 64 tokens: all finish, every block is free again, the audit is clean", gives_everything_back),
    Promise("the second identical 512-token prompt comes out of the cache", finds_a_long_prompt),
    Promise("step() does not wait for the cache manager", never_waits_for_the_manager),
]
