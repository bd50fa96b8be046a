"""What is wrong is said on one line, to whom it concerns, and disturbs nobody else."""

import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.promise import Outcome, Promise, Workbench, ask, greedy
from bench.prompts import PASSAGE
from pagekeeper.client import Client
from pagekeeper.common.errors import InvalidRequestError, PagekeeperError, UnknownModelError


def refusal(bench: Workbench, prompt: str | list[int], **options: Any) -> PagekeeperError | None:  # noqa: ANN401 - options of generate
    """The error that a request ends with; None if it is served."""
    try:
        with Client(bench.server.address) as client:
            list(client.generate(prompt, **({"max_tokens": 4} | options)))
    except PagekeeperError as error:
        return error
    return None


def but(names: list[str]) -> str:
    """The exceptions, if there are any."""
    return f", but not {', '.join(names)}" if names else ""


def wrong_requests_are_refused(bench: Workbench) -> Outcome:
    too_long = bench.reference.encode(PASSAGE) * 400
    cases: list[tuple[str, type[PagekeeperError], Callable[[], PagekeeperError | None]]] = [
        ("empty text", InvalidRequestError, lambda: refusal(bench, "")),
        ("no tokens", InvalidRequestError, lambda: refusal(bench, [])),
        ("prompt over the limit", InvalidRequestError, lambda: refusal(bench, too_long)),
        ("token -1", InvalidRequestError, lambda: refusal(bench, [1, -1])),
        ("token V", InvalidRequestError, lambda: refusal(bench, [1, bench.reference.vocab_size])),
        ("token 2**31", InvalidRequestError, lambda: refusal(bench, [1, 2**31])),
        ("temperature NaN", InvalidRequestError, lambda: refusal(bench, "x", temperature=math.nan)),
        ("unknown model", UnknownModelError, lambda: refusal(bench, "x", model="no-such-model")),
    ]
    bystander = greedy(bench.reference.encode("The keeper of the lighthouse"), max_tokens=128)
    undisturbed = ask(bench.server, bystander)
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(ask, bench.server, bystander)
        errors = [(name, kind, provoke()) for name, kind, provoke in cases]
        disturbed = beside.result()
    wrong = [name for name, kind, error in errors if not isinstance(error, kind) or "\n" in str(error)]
    same = disturbed.candidates[0].token_ids == undisturbed.candidates[0].token_ids
    return Outcome(
        f"{len(errors) - len(wrong)} of {len(errors)} typed, on one line{but(wrong)}; "
        f"a neighbour's answer is {'the same' if same else 'changed'}",
        "all, the same",
        not wrong and same,
    )


def start_failure(*flags: str) -> tuple[int, str]:
    """Exit code of `pagekeeper up`, and the lines of its standard error that are no log."""
    done = subprocess.run(
        [sys.executable, "-m", "pagekeeper", "up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("{"))


def wrong_starts_are_refused(bench: Workbench) -> Outcome:
    model = ("--model", str(bench.model), "--pool-size", "64MiB")
    cases = {
        "missing model directory": start_failure("--model", str(Path("/no/such/model"))),
        "busy port": start_failure(*model, "--listen", bench.server.address),
        "busy admin port": start_failure(*model, "--admin-listen", bench.server.admin),
    }
    wrong = [name for name, (code, words) in cases.items() if code != 2 or not words or "\n" in words]
    alive = bool(ask(bench.server, greedy("The lighthouse", max_tokens=4)).candidates)
    return Outcome(
        f"{len(cases) - len(wrong)} of {len(cases)} on one line with exit code 2{but(wrong)}; "
        f"the running server {'answers' if alive else 'does not answer'}",
        "all, answers",
        not wrong and alive,
    )


PROMISES = [
    Promise("wrong requests: typed, one-line errors; nobody else is disturbed", wrong_requests_are_refused),
    Promise("wrong starts: one-line errors; the running server is not disturbed", wrong_starts_are_refused),
]
