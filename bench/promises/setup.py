"""Two commands on a fresh machine."""

import subprocess
import time

from bench.promise import Outcome, Promise, Workbench
from bench.promises import tested

_DEMO_LIMIT_S = 30.0
_TEST_LIMIT_S = 12 * 60.0


def run(*command: str) -> tuple[float, str, int]:
    """Seconds, output and exit code of a command."""
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return time.monotonic() - began, done.stdout, done.returncode


def demo_answers(bench: Workbench) -> Outcome:
    seconds, output, code = run("make", "demo")
    answers, has_table = "Paris" in output, "prefix hits" in output
    return Outcome(
        f"{seconds:.1f} s, {'Paris' if answers else 'no Paris'}, {'a table' if has_table else 'no table'}, exit {code}",
        f"< {_DEMO_LIMIT_S:.0f} s, Paris, a table, exit 0",
        answers and has_table and code == 0 and seconds < _DEMO_LIMIT_S,
    )


def tests_pass(bench: Workbench) -> Outcome:
    seconds, output, code = run("make", "test", "DOCKER_ENGINE=")  # what needs an engine is the next promise
    return Outcome(
        f"{seconds / 60:.1f} min, exit {code}: {_summary(output, code)}",
        f"< {_TEST_LIMIT_S / 60:.0f} min, exit 0",
        code == 0 and seconds < _TEST_LIMIT_S,
    )


def containers_serve(_: Workbench) -> Outcome:
    seconds, output, code = run("make", "compose-test")
    return Outcome(f"{seconds / 60:.1f} min, exit {code}: {_summary(output, code)}", "exit 0", code == 0)


def _summary(output: str, code: int) -> str:
    """Tests are not all of it: of a failure the last words as well, and where the rest is."""
    counts = tested.counted(output)
    if not code:
        return counts
    last_words = [line for line in output.splitlines()[-3:] if line.strip("= ") not in counts]
    return "; ".join([counts, *last_words, tested.kept(output)])


PROMISES = [
    Promise("make demo, run again, answers and shows the cache", demo_answers),
    Promise("make test passes", tests_pass),
    Promise("make compose-test: three containers serve, recover and leave nothing behind", containers_serve),
]
