"""compose.gpu.yaml as far as it can be tried without a GPU: on the CPU, in the containers that a GPU would be given to.

The image is the one that `make compose-test` has built.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagekeeper.client import AdminClient, Client, Message
from pagekeeper.common.errors import PagekeeperError
from tests.docker.compose import SERVICES, STANDBY, Compose, leftovers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

HOLDER = "pid-namespace"
MODULES = {"cache-manager": "cache_manager", "runner": "model_runner"}
ON_THE_DEVICE = tuple(MODULES)
FILES = ("compose.yaml", "compose.gpu.yaml")


def read_together(project: Compose) -> dict[str, Any]:
    """Both files, as Docker Compose merges them."""
    return yaml.safe_load(project("config"))


@pytest.fixture(scope="module")
def compose(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The containers of both files, with nothing but the GPU taken from them."""
    project = Compose(home=demo_model.parent.parent, files=FILES)
    merged = read_together(project)
    for service in merged["services"].values():
        service |= {"image": "pagekeeper"}
        service.pop("build", None)
        if service.pop("deploy", None):
            service["environment"]["PAGEKEEPER_DEVICE"] = "cpu"
    without_gpu = tmp_path_factory.mktemp("compose") / "compose.yaml"
    without_gpu.write_text(yaml.safe_dump(merged))
    project.files = (str(without_gpu),)
    project("down", "--volumes", "--timeout", "0")  # of a run that was cut off
    try:
        project("up", "--detach", "--no-build")
        project.wait_until_healthy()
        yield project
    finally:
        project("down", "--volumes")
    assert not leftovers()


def pid_of(project: Compose, service: str) -> int:
    """Of the container's own process, as the host counts."""
    return int(project.container(service)["State"]["Pid"])


def pid_namespace(project: Compose, service: str) -> str:
    return project.execute(service, "readlink /proc/self/ns/pid")


def kill(project: Compose, service: str) -> None:
    """End the service's process as a fault of its own would, among all that a shared PID namespace shows.

    From the holder's container, which lives on: a script does not outlive the container that it runs in.
    """
    module = MODULES[service]
    # The brackets keep the script from finding itself.
    is_it = f"tr '\\0' ' ' <$p/cmdline | grep --quiet -e '-m [{module[0]}]{module[1:]} '"
    project.execute(HOLDER, f"for p in /proc/[0-9]*; do {is_it} && kill -KILL ${{p#/proc/}}; done; true")


def answers(project: Compose) -> bool:
    try:
        with Client(project.address) as client:
            question = [Message("user", "What is the capital of France?")]
            return "Paris" in "".join(delta.text for delta in client.generate(question, temperature=0, max_tokens=32))
    except PagekeeperError:
        return False


def test_the_same_gpu_goes_to_manager_and_runners_and_to_nobody_else(tmp_path: Path) -> None:
    on_the_device = (*ON_THE_DEVICE, STANDBY)
    merged = read_together(Compose(home=tmp_path, files=FILES, services=(*SERVICES, STANDBY)))
    devices = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in merged["services"].items()
        if "deploy" in service
    }
    one = [{"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}]
    assert devices == dict.fromkeys(on_the_device, one)
    for name in on_the_device:
        assert merged["services"][name]["environment"]["PAGEKEEPER_DEVICE"] == "cuda"
        assert merged["services"][name]["pid"] == f"service:{HOLDER}"
    assert merged["services"]["cache-manager"]["build"]["args"]["EXTRAS"] == "cuda"
    assert {service["image"] for service in merged["services"].values()} == {"pagekeeper-gpu"}


def test_the_two_share_the_holders_pid_namespace_and_the_gateway_has_its_own(compose: Compose) -> None:
    shared = pid_namespace(compose, HOLDER)
    assert [pid_namespace(compose, service) == shared for service in (*ON_THE_DEVICE, "gateway")] == [True, True, False]
    for service in ON_THE_DEVICE:
        commands = compose.execute(service, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert [f"-m {module} " in commands for module in MODULES.values()] == [True, True]


def test_the_manager_knows_the_runner_by_a_pid_that_means_something_to_it(compose: Compose) -> None:
    with AdminClient(compose.admin) as admin:
        (session,) = admin.stats()["sessions"]
    command = compose.execute("cache-manager", f"tr '\\0' ' ' </proc/{session['pid']}/cmdline")
    assert "model_runner" in command


@pytest.mark.parametrize("service", [HOLDER, *ON_THE_DEVICE])
def test_a_container_can_do_no_more_than_it_needs(compose: Compose, service: str) -> None:
    container = compose.container(service)
    host = container["HostConfig"]
    assert (host["ReadonlyRootfs"], host["Privileged"], host["CapDrop"]) == (True, False, ["ALL"])
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["IpcMode"] == "private"
    assert bool(host["Init"]) == (service == HOLDER)
    assert (host["NetworkMode"] == "none") == (service != "cache-manager")
    assert container["Config"]["User"] == "10001:10001"
    if service == HOLDER:
        assert container["Mounts"] == []


def test_the_runner_alone_can_keep_compiled_kernels_and_load_them(compose: Compose) -> None:
    assert compose.execute("runner", "stat -c '%u %a' /var/cache/pagekeeper") == "10001 700\n"
    compose.execute("runner", "touch /var/cache/pagekeeper/x && rm /var/cache/pagekeeper/x")
    assert "noexec" not in compose.execute("runner", "grep ' /var/cache/pagekeeper ' /proc/mounts")
    others = [mount["Destination"] for mount in compose.container("cache-manager")["Mounts"]]
    assert "/var/cache/pagekeeper" not in others


@pytest.mark.parametrize(("dies", "lives"), [ON_THE_DEVICE, ON_THE_DEVICE[::-1]])
def test_the_death_of_one_leaves_the_other_alive(compose: Compose, dies: str, lives: str) -> None:
    before, restarts = pid_of(compose, lives), compose.restarts()
    kill(compose, dies)
    compose.wait_until(lambda: compose.restarts()[dies] == restarts[dies] + 1, f"{dies} restarts")
    compose.wait_until(lambda: answers(compose), f"answers after {dies} was killed")
    compose.wait_until_healthy()
    assert pid_of(compose, lives) == before
    assert compose.restarts()[lives] == restarts[lives]


def test_stop_ends_every_process_with_0(compose: Compose) -> None:
    compose("stop")
    services = (*ON_THE_DEVICE, "gateway")
    assert {service: compose.container(service)["State"]["ExitCode"] for service in services} == dict.fromkeys(
        services, 0
    )
    compose("start")
    compose.wait_until_healthy()
    assert answers(compose)
