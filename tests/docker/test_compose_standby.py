"""compose.yaml with a standby runner: whatever dies or is replaced, a live stream goes on, and says the same."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagekeeper.client import AdminClient, Client, Delta
from tests.docker.compose import SERVICES, STANDBY, Compose, leftovers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

NUM_STREAMS = 3
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def compose(demo_model: Path) -> Iterator[Compose]:
    """The four containers, up and healthy; afterwards nothing is left of them."""
    project = Compose(home=demo_model.parent.parent, services=(*SERVICES, STANDBY))
    project("down", "--volumes", "--timeout", "0")  # of a run that was cut off
    try:
        project("up", "--detach", "--no-build")
        project.wait_until_healthy()
        yield project
    finally:
        project("down", "--volumes")
    assert not leftovers()


def count(client: Client) -> Iterator[Delta]:
    return client.generate("One, two, three,", temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def tokens_of(deltas: Iterator[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("service", [*SERVICES, STANDBY])
def test_a_stream_goes_on_whichever_process_crashes(compose: Compose, service: str) -> None:
    restarts = compose.restarts()
    with Client(compose.address) as client:
        whole = tokens_of(count(client))
        deltas = count(client)
        tokens = list(next(deltas).token_ids)
        compose.crash(service)
        tokens += tokens_of(deltas)
    assert tokens == whole
    compose.wait_until(lambda: compose.restarts()[service] == restarts[service] + 1, f"{service} restarts")
    compose.wait_until_healthy()
    check_both_runners_are_attached(compose)


def test_a_rolling_restart_of_the_runners_fails_no_stream(compose: Compose) -> None:
    """The commands are those of docs/operations.md."""
    over = threading.Event()

    def ask_again_and_again() -> list[list[int]]:
        answers = []
        with Client(compose.address) as client:
            while not over.is_set():
                answers.append(tokens_of(count(client)))
        return answers

    with Client(compose.address) as client:
        whole = tokens_of(count(client))
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        asking = [pool.submit(ask_again_and_again) for _ in range(NUM_STREAMS)]
        try:
            for runner in (STANDBY, "runner"):
                before = compose.container(runner)["Id"]
                compose("up", "--detach", "--no-build", "--no-deps", "--force-recreate", runner)
                compose.wait_until_healthy()
                assert compose.container(runner)["Id"] != before
        finally:
            over.set()
    answers = [answer for each in asking for answer in each.result()]
    assert len(answers) > NUM_STREAMS
    assert all(answer == whole for answer in answers)
    check_both_runners_are_attached(compose)


def check_both_runners_are_attached(compose: Compose) -> None:
    def names() -> set[str]:
        return {session["runner_id"].rpartition("-")[0] for session in admin.stats()["sessions"]}

    with AdminClient(compose.admin) as admin:
        compose.wait_until(lambda: len(admin.stats()["sessions"]) == 2, "two sessions")
        assert names() == {"0", "standby"}
        assert admin.audit() == []
