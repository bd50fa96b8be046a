"""compose.yaml in a real engine, with the image that `make compose-test` has built and the demo model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagekeeper.client import AdminClient, Client, Delta, Message
from pagekeeper.common.errors import PagekeeperError
from tests.docker.compose import SERVICES, Compose, leftovers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

QUESTION = [Message("user", "What is the capital of France?")]


@pytest.fixture(scope="module")
def compose(demo_model: Path) -> Iterator[Compose]:
    """The three containers, up and healthy; afterwards nothing is left of them."""
    project = Compose(home=demo_model.parent.parent)
    project("down", "--volumes", "--timeout", "0")  # of a run that was cut off
    try:
        project("up", "--detach", "--no-build")
        project.wait_until_healthy()
        yield project
    finally:
        project("down", "--volumes")
    assert not leftovers()


def ask(project: Compose) -> str:
    with Client(project.address) as client:
        return "".join(delta.text for delta in client.generate(QUESTION, temperature=0, max_tokens=32))


def count(client: Client, num_tokens: int) -> Iterator[Delta]:
    return client.generate("One, two, three,", temperature=0, max_tokens=num_tokens, ignore_eos=True)


def tokens_of(deltas: Iterator[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_the_gateway_answers_from_outside(compose: Compose) -> None:
    assert "Paris" in ask(compose)


def test_the_admin_port_answers_from_outside(compose: Compose) -> None:
    with AdminClient(compose.admin) as admin:
        stats = admin.stats()
        assert admin.audit() == []
    assert len(stats["sessions"]) == 1
    assert stats["pool"]["backend"] == "memfd"


def test_the_command_line_reaches_both_ports(compose: Compose) -> None:
    for address in (compose.address, compose.admin):
        command = [sys.executable, "-m", "pagekeeper", "health", "--server", address]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_can_do_no_more_than_it_needs(compose: Compose, service: str) -> None:
    container = compose.container(service)
    host = container["HostConfig"]
    assert (host["ReadonlyRootfs"], host["Init"], host["Privileged"]) == (True, True, False)
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    published = [binding for bindings in (host["PortBindings"] or {}).values() for binding in bindings]
    assert {binding["HostIp"] for binding in published} <= {"127.0.0.1"}
    assert (host["NetworkMode"] == "none") == (service == "runner") == (not published)
    facts = "id -u; stat -c '%u %a' /run/pagekeeper; touch /opt/pagekeeper/x /models/x 2>/dev/null || echo read-only"
    assert compose.execute(service, facts).splitlines() == ["10001", "10001 700", "read-only"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_crashed_process_is_restarted_and_answers_as_before(compose: Compose, service: str) -> None:
    before, restarts = ask(compose), compose.restarts()
    compose.crash(service)
    compose.wait_until(lambda: compose.restarts()[service] == restarts[service] + 1, f"{service} restarts")

    def answers_again() -> bool:
        try:
            return ask(compose) == before
        except PagekeeperError:
            return False

    compose.wait_until(answers_again, f"answers after {service} was killed")
    compose.wait_until_healthy()
    assert compose.restarts() == restarts | {service: restarts[service] + 1}
    with AdminClient(compose.admin) as admin:
        compose.wait_until(lambda: len(admin.stats()["sessions"]) == 1, "the runner's session alone is left")
        assert admin.audit() == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_stream_goes_on_whichever_process_crashes(compose: Compose, service: str) -> None:
    restarts = compose.restarts()
    with Client(compose.address) as client:
        whole = tokens_of(count(client, 96))
        deltas = count(client, 96)
        tokens = list(next(deltas).token_ids)
        compose.crash(service)
        tokens += tokens_of(deltas)
    assert tokens == whole
    compose.wait_until(lambda: compose.restarts()[service] == restarts[service] + 1, f"{service} restarts")
    compose.wait_until_healthy()


def test_stop_lets_a_running_answer_finish_and_every_process_exit_with_0(compose: Compose) -> None:
    with Client(compose.address) as client:
        deltas = count(client, 96)  # far less than the grace has time for
        tokens = list(next(deltas).token_ids)
        compose("stop")
        tokens += tokens_of(deltas)
    assert len(tokens) == 96
    assert {service: compose.container(service)["State"]["ExitCode"] for service in SERVICES} == dict.fromkeys(
        SERVICES, 0
    )
    compose("start")
    compose.wait_until_healthy()
    assert "Paris" in ask(compose)
