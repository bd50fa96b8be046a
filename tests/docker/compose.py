"""The containers of compose.yaml as one project of their own, driven as a person drives them."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT = "pagekeeper-test"
SERVICES = ("cache-manager", "runner", "gateway")
STANDBY = "runner-standby"
LIMIT_S = 180.0
_LABEL = "com.docker.compose"


class Compose:
    """The project, under names and on ports that are in nobody's way.

    Args:
        home: the host's PAGEKEEPER_HOME, with the demo model.
        files: see below.
        services: see below; a standby among them brings its profile with it.

    Attributes:
        files: that make up the project, in the order in which they are merged.
        services: that it consists of.
        address: of the gateway, on the host.
        admin: of the cache manager's admin port, on the host.
    """

    def __init__(
        self, home: Path, files: tuple[str, ...] = ("compose.yaml",), services: tuple[str, ...] = SERVICES
    ) -> None:
        self.address, self.admin = (f"127.0.0.1:{port}" for port in _free_ports(2))
        self._environment = os.environ | {
            "PAGEKEEPER_HOME": str(home),
            "PAGEKEEPER_LISTEN": self.address,
            "PAGEKEEPER_ADMIN_LISTEN": self.admin,
            "PAGEKEEPER_POOL_SIZE": "256MiB",
            "PAGEKEEPER_RUNNER_WAIT_S": str(LIMIT_S),
            "COMPOSE_PROFILES": "standby" if STANDBY in services else "",
        }
        compose = ["docker", "compose"] if _succeeds("docker", "compose", "version") else ["docker-compose"]
        self._command = [*compose, "--project-name", PROJECT]
        self.files = files
        self.services = services

    def __call__(self, *args: str) -> str:
        """What a command of Docker Compose prints on standard output; it has to succeed."""
        done = subprocess.run(
            [*self._command, *(f"--file={file}" for file in self.files), *args],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"compose {' '.join(args)}: {done.stdout}{done.stderr}"
        return done.stdout

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of the service's one container."""
        (name,) = _list("ps", "--all", "--filter", f"label={_LABEL}.service={service}")
        return json.loads(docker("inspect", name))[0]

    def execute(self, service: str, script: str) -> str:
        """What a shell script prints that runs in the service's container."""
        return docker("exec", self.container(service)["Id"], "sh", "-c", script)

    def crash(self, service: str) -> None:
        """End the process in a container as a fault of its own would; what `docker kill` ends stays down."""
        script = "kill -KILL $(cat /proc/1/task/1/children)"
        # Detached: the script dies with the container, now and then before it could end with 0.
        docker("exec", "--detach", self.container(service)["Id"], "sh", "-c", script)

    def is_healthy(self, service: str) -> bool:
        """Whether the container runs and its health check has succeeded since it last started."""
        state = self.container(service)["State"]
        return state["Running"] and state["Health"]["Status"] == "healthy"

    def restarts(self) -> dict[str, int]:
        """How often the restart policy has restarted each container."""
        return {service: self.container(service)["RestartCount"] for service in self.services}

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until `condition` holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}\n{self._report()}"
            time.sleep(0.25)

    def wait_until_healthy(self) -> None:
        """Poll until every container is healthy."""
        self.wait_until(lambda: all(self.is_healthy(service) for service in self.services), "healthy containers")

    def _report(self) -> str:
        """Of each container: its state as the engine knows it, with its last health checks, and its last log lines."""
        parts = []
        for service in self.services:
            container = self.container(service)
            state = json.dumps(container["State"] | {"RestartCount": container["RestartCount"]}, indent=1)
            parts.append(f"{service}: {state}\n{docker('logs', '--timestamps', '--tail', '40', container['Id'])}")
        return "\n".join(parts)


def docker(*args: str) -> str:
    """Run a docker command, which has to succeed; both its outputs."""
    done = subprocess.run(
        ["docker", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"docker {' '.join(args)}: {done.stdout}"
    return done.stdout


def leftovers() -> list[str]:
    """Containers, volumes and networks that the project has now."""
    return _list("ps", "--all") + _list("volume", "ls") + _list("network", "ls")


def _list(*command: str) -> list[str]:
    return docker(*command, "--quiet", "--filter", f"label={_LABEL}.project={PROJECT}").split()


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
