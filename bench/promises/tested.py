"""Promises that the test suite measures: each row runs its tests and counts them."""

import os
import re
import subprocess
import sys
import tempfile

from bench.promise import Outcome, Promise, Workbench


def promise(name: str, *selection: str, **environment: str) -> Promise:
    """A promise that is kept when every test passes that pytest chooses by `selection`, paths for the most part."""

    def measure(_: Workbench) -> Outcome:
        command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=1e9", *selection]
        variables = os.environ | environment
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=variables
        )
        counts = counted(done.stdout)
        passed = done.returncode == 0 and re.search(r"\d+ passed", counts) is not None
        return Outcome(counts if passed else f"{counts}; {kept(done.stdout)}", "all tests", passed)

    return Promise(name, measure)


def counted(output: str) -> str:
    """What pytest says at its end, on one line: how many tests passed, then which did not."""
    told = [line for line in output.splitlines() if re.match(r"FAILED|ERROR|=* ?\d+ (passed|failed)", line)]
    return "; ".join(line.strip("= ") for line in told[::-1]) or "no test was run"


def kept(output: str) -> str:
    """Where all of it can be read: what failed once may not fail again."""
    with tempfile.NamedTemporaryFile("w", prefix="pk-accept-", suffix=".log", delete=False) as log:
        log.write(output)
    return f"all of it in {log.name}"


_INTEGRATION = "tests/integration"

PROMISES = [
    promise("logits within 2e-3 of transformers: architectures, rope, GGUF types, the demo model", "tests/golden"),
    promise(
        "two runners on one small pool neither deadlock nor starve", f"{_INTEGRATION}/test_cache_manager_sharing.py"
    ),
    promise(
        "each process: exit code 0 after a drain that finishes what runs, else non-zero",
        f"{_INTEGRATION}/test_runner_process.py",
        f"{_INTEGRATION}/test_gateway_process.py",
        f"{_INTEGRATION}/test_cache_manager.py",
        f"{_INTEGRATION}/test_cache_manager_stop.py",
        f"{_INTEGRATION}/test_up.py",
    ),
    promise(
        "damaged and hostile model files: one typed line, no memory by the file's word",
        "tests/unit/model",
        f"{_INTEGRATION}/test_model_files.py",
    ),
    promise("a 17 MiB message, a 200,000-token prompt: typed errors", f"{_INTEGRATION}/test_client.py"),
]
