"""The `pagekeeper` command: what there is to say, and what a failure means to the shell.

Exit codes: 0 ok, 1 the server said no, 2 usage or configuration, 3 cannot connect, 130 interrupted.
"""

import os
import sys

import typer

from pagekeeper.cli.doctor import doctor
from pagekeeper.cli.generate import generate
from pagekeeper.cli.health import health
from pagekeeper.cli.stats import stats
from pagekeeper.common.errors import CannotConnectError, ConfigurationError, PagekeeperError

app = typer.Typer(
    name="pagekeeper",
    help="An LLM server over gRPC whose KV cache outlives the engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(generate)
app.command()(stats)
app.command()(health)
app.command()(doctor)

# These commands read their own flags, so --help is theirs as well.
_OWN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_OWN_FLAGS)
def up(context: typer.Context) -> None:
    """Serve: run and supervise all processes."""
    from pagekeeper.cli.up import run

    sys.exit(run(context.args))


@app.command(context_settings=_OWN_FLAGS)
def model(context: typer.Context) -> None:
    """Fetch the demo model, inspect any model."""
    from pagekeeper.cli.model import app as model_app

    model_app(context.args, prog_name="pagekeeper model")


@app.command("cache-manager", context_settings=_OWN_FLAGS)
def cache_manager(context: typer.Context) -> None:
    """Run the cache manager alone."""
    _become("cache_manager", context.args)


@app.command(context_settings=_OWN_FLAGS)
def runner(context: typer.Context) -> None:
    """Run one model runner alone."""
    _become("model_runner", context.args)


@app.command(context_settings=_OWN_FLAGS)
def gateway(context: typer.Context) -> None:
    """Run the gateway alone."""
    _become("gateway", context.args)


def _become(module: str, args: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606 - no shell is the point


def main() -> None:
    """Run the command line; every error that was raised on purpose is one line on standard error."""
    try:
        app()
    except PagekeeperError as error:
        print(f"pagekeeper: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(_exit_code(error))


def _exit_code(error: PagekeeperError) -> int:
    match error:
        case ConfigurationError():
            return 2
        case CannotConnectError():
            return 3
        case _:
            return 1
