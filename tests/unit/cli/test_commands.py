"""The commands against fake servers: output, exit codes, one-line errors."""

import io
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from pagekeeper import Candidate
from pagekeeper.cli.generate import Result, growing
from pagekeeper.cli.main import main
from pagekeeper.v1 import admin_pb2, generate_pb2, types_pb2
from tests.unit.cli.fakes import WRONG_TOP_P, FakeAdmin, FakeGateway, serving

NOBODY = "127.0.0.1:1"


@pytest.fixture
def pagekeeper(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run a command line; gives exit code, standard output and standard error."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagekeeper", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def two_candidates() -> Iterator[generate_pb2.GenerateResponse]:
    for position, token in enumerate((10, 11)):
        finish = types_pb2.FINISH_REASON_LENGTH if position else types_pb2.FINISH_REASON_UNSPECIFIED
        deltas = [
            generate_pb2.CandidateDelta(
                index=i, position=position, token_ids=[token + i], text=f"{i}{position} ", finish_reason=finish
            )
            for i in range(2)
        ]
        yield generate_pb2.GenerateResponse(
            deltas=deltas,
            seed=7 if position == 0 else None,
            usage=types_pb2.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=4) if position else None,
        )


def one_candidate(text: str, position: int = 0) -> generate_pb2.GenerateResponse:
    delta = generate_pb2.CandidateDelta(text=text, token_ids=[1], position=position)
    return generate_pb2.GenerateResponse(deltas=[delta], seed=1)


def test_generate_prints_the_text_and_nothing_else_when_piped(pagekeeper: Any) -> None:
    gateway = FakeGateway(one_candidate("The capital"), one_candidate(" is Paris.", position=1))
    with serving(gateway=gateway) as address:
        assert pagekeeper("generate", "q", "--chat", "--server", address) == (0, "The capital is Paris.\n", "")
    assert gateway.requests[0].chat.messages[0].role == "user"


def test_generate_json_is_one_object_with_the_documented_keys(pagekeeper: Any) -> None:
    with serving(gateway=FakeGateway(*two_candidates())) as address:
        code, out, err = pagekeeper("generate", "q", "-n", "2", "--json", "--server", address)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["candidates"] == [
        {"index": 0, "text": "00 01 ", "token_ids": [10, 11], "finish_reason": "length", "logprobs": None},
        {"index": 1, "text": "10 11 ", "token_ids": [11, 12], "finish_reason": "length", "logprobs": None},
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "resumed_tokens": 0,
        "recomputed_tokens": 0,
        "completion_tokens": 4,
    }
    assert answer["seed"] == 7
    assert set(answer["timing"]) == {"ttft_s", "total_s"}
    assert set(answer) == {"candidates", "usage", "seed", "timing"}


def test_several_answers_are_printed_one_after_the_other(pagekeeper: Any) -> None:
    with serving(gateway=FakeGateway(*two_candidates())) as address:
        assert pagekeeper("generate", "q", "-n", "2", "--server", address)[1] == "[0] 00 01 \n[1] 10 11 \n"


def test_several_answers_grow_side_by_side_on_a_terminal_and_stay_one_after_the_other() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=20, height=12)
    result = Result(0.0, {i: Candidate(i, f"begin {i} " + "word " * 30 + f"end {i}") for i in range(2)})
    shown = growing(result, console)
    lines = shown.plain.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[0]", "[1]"]
    assert "begin" not in shown.plain
    assert all(f"end {i}" in shown.plain for i in range(2))
    assert len(lines) <= console.height


def test_hypotheses_are_labelled_with_their_scores(pagekeeper: Any) -> None:
    deltas = [
        generate_pb2.CandidateDelta(index=i, text="x", token_ids=[1], finish_reason=1, score=-0.5 - i) for i in range(2)
    ]
    gateway = FakeGateway(generate_pb2.GenerateResponse(deltas=deltas, seed=1))
    with serving(gateway=gateway) as address:
        out = pagekeeper("generate", "q", "--beam-width", "4", "-n", "2", "--server", address)[1]
    assert out == "[0 -0.5000] x\n[1 -1.5000] x\n"
    assert gateway.requests[0].sampling.beam_search.width == 4


def test_case_29_minus_infinity_is_a_number_in_json(pagekeeper: Any) -> None:
    """Case 29: the JSON of log-probabilities is JSON."""
    token = types_pb2.TokenLogprobs(
        token_id=5, logprob=-math.inf, rank=3, top_token_ids=[7, 8], top_logprobs=[-0.5, -math.inf]
    )
    delta = generate_pb2.CandidateDelta(
        text="x", token_ids=[5], finish_reason=1, logprobs=[token], cumulative_logprob=-math.inf
    )
    gateway = FakeGateway(generate_pb2.GenerateResponse(deltas=[delta], seed=1))
    with serving(gateway=gateway) as address:
        out = pagekeeper("generate", "q", "--logprobs", "2", "--json", "--server", address)[1]
    (candidate,) = json.loads(out, parse_constant=pytest.fail)["candidates"]
    top = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -9999.0}]
    assert candidate["logprobs"] == [{"token_id": 5, "logprob": -9999.0, "rank": 3, "top": top}]
    assert candidate["cumulative_logprob"] == -9999.0
    assert gateway.requests[0].sampling.logprobs == 2


def test_logprobs_without_json_are_a_wrong_option(pagekeeper: Any) -> None:
    code, out, err = pagekeeper("generate", "q", "--logprobs", "0")
    assert (code, out) == (2, "")
    assert "needs --json" in err


def test_every_sampling_option_reaches_the_server(pagekeeper: Any) -> None:
    gateway = FakeGateway(one_candidate("x"))
    options = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k -1 --min-p 0.1 --seed 3 --stop a --stop b"
    with serving(gateway=gateway) as address:
        pagekeeper("generate", "q", *shlex.split(options), "--server", address)
    sampling = gateway.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed, list(sampling.stop)) == (-1, 0.1, 3, ["a", "b"])


def test_a_refusal_is_one_line_and_exit_code_1(pagekeeper: Any) -> None:
    with serving(gateway=FakeGateway(failure=WRONG_TOP_P)) as address:
        code, out, err = pagekeeper("generate", "q", "--json", "--server", address)
    assert (code, out) == (1, "")
    assert err == "pagekeeper: sampling.top_p: must be in (0, 1]\n"


@pytest.mark.parametrize("command", [["generate", "q"], ["stats"], ["stats", "--json"], ["health"]])
def test_nobody_at_the_address_is_one_line_and_exit_code_3(pagekeeper: Any, command: list[str]) -> None:
    code, out, err = pagekeeper(*command, "--server", NOBODY)
    assert (code, out) == (3, "")
    assert err == f"pagekeeper: cannot connect to {NOBODY}; `pagekeeper up` starts a server\n"


def test_a_wrong_option_is_exit_code_2(pagekeeper: Any) -> None:
    assert pagekeeper("generate", "q", "--temprature", "1")[0] == 2


def test_asking_the_admin_port_to_generate_says_so(pagekeeper: Any) -> None:
    admin = FakeAdmin(admin_pb2.GetStatsResponse(), admin_pb2.AuditResponse())
    with serving(admin=admin) as address:
        code, _, err = pagekeeper("generate", "q", "--server", address)
    assert code == 3
    assert "the gateway generates, the admin port has stats" in err


def test_stats_json_has_the_documented_names(pagekeeper: Any) -> None:
    numbers = admin_pb2.GetStatsResponse(sessions=[admin_pb2.SessionStats()])
    with serving(admin=FakeAdmin(numbers, admin_pb2.AuditResponse())) as address:
        code, out, err = pagekeeper("stats", "--json", "--server", address)
    assert (code, err) == (0, "")
    stats = json.loads(out)
    assert {name: " ".join(part if isinstance(part, dict) else part[0]) for name, part in stats.items()} == {
        "pool": "total_blocks free_blocks cached_blocks leased_blocks sealed_blocks quarantined_blocks "
        "block_size block_bytes backend",
        "usage": "sequences logical_tokens resident_tokens utilization logical_blocks physical_blocks sharing_saved",
        "prefix": "lookups reopens queried_tokens hit_tokens evictions",
        "ops": "forks copy_on_write seals folds shortages",
        "sessions": "epoch runner_id pid state attached_at",
        "server": "started_at version",
    }


def test_stats_are_a_table_for_people(pagekeeper: Any) -> None:
    numbers = admin_pb2.GetStatsResponse(sessions=[admin_pb2.SessionStats(epoch=4, runner_id="r0", state="attached")])
    numbers.pool.total_blocks, numbers.pool.block_size, numbers.pool.block_bytes = 1024, 16, 2**20
    numbers.prefix.hit_tokens, numbers.prefix.queried_tokens = 496, 1024
    with serving(admin=FakeAdmin(numbers, admin_pb2.AuditResponse())) as address:
        code, out, _ = pagekeeper("stats", "--server", address)
    assert code == 0
    assert "1,024 blocks of 16 tokens, 1,024 MiB" in out
    assert "496 of 1,024 tokens" in out
    assert "runner r0" in out


def test_stats_show_what_is_in_quarantine_and_since_which_session(pagekeeper: Any) -> None:
    dead = admin_pb2.SessionStats(epoch=4, runner_id="r0", pid=7, state="quarantined")
    numbers = admin_pb2.GetStatsResponse(sessions=[dead], pool=admin_pb2.PoolStats(quarantined_blocks=3))
    with serving(admin=FakeAdmin(numbers, admin_pb2.AuditResponse())) as address:
        out = pagekeeper("stats", "--server", address)[1]
    assert "3 quarantined" in out
    assert "runner r0, pid 7, quarantined" in out


def test_stats_are_watched_until_the_server_is_gone(pagekeeper: Any) -> None:
    numbers = admin_pb2.GetStatsResponse(pool=admin_pb2.PoolStats(total_blocks=1024))
    with serving(admin=FakeAdmin(numbers, admin_pb2.AuditResponse())) as address:
        code, out, err = pagekeeper("stats", "--watch", "--json", "--server", address)
    assert [json.loads(line)["pool"]["total_blocks"] for line in out.splitlines()] == [1024, 1024]
    assert (code, err) == (3, f"pagekeeper: cannot connect to {address}; `pagekeeper up` starts a server\n")


def test_the_command_line_starts_without_grpc_and_torch() -> None:
    program = "import sys, pagekeeper.cli.main; print([m for m in ('torch', 'grpc', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
