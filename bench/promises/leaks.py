"""Whatever becomes of requests, nothing of them stays."""

from bench.promise import Outcome, Promise, Workbench
from bench.promises import tested
from pagekeeper.cli.server import Server
from tests.leaks import check_that_nothing_leaks, environment
from tests.models import write_tiny_model


def leaves_nothing_behind(bench: Workbench) -> Outcome:
    folder = bench.folder / "leaks"
    model = write_tiny_model(folder / "tiny", max_position_embeddings=2048)
    flags = ("--model", str(model), "--pool-size", "2MiB")
    with Server(*flags, log=folder / "log", environment=environment(folder)) as server:
        ends = check_that_nothing_leaks(server, folder)
    early = ends.total() - ends["finished"]
    figure = f"{ends.total()} requests, {early} of them ended early: nothing is left of them"
    return Outcome(figure, "nothing", passed=True)


def no_growth(deaths: int) -> Promise:
    """Manager and runner, on a tiny model, each through so many deaths of the other."""
    name = f"{deaths} deaths of the other leave neither runner nor manager larger (tiny model)"
    return tested.promise(name, "tests/integration/test_growth.py", TEST_CYCLES=str(deaths))


PROMISES = [
    Promise(
        "1,000 requests cancelled at every phase leave no block, sequence, task, thread or descriptor (tiny model)",
        leaves_nothing_behind,
    ),
    no_growth(20),
]
