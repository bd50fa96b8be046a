"""`make demo`: start a server, ask it a question over gRPC twice, show what its cache holds, stop it."""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from pagekeeper.cli.generate import Result, collect, printable, write
from pagekeeper.cli.server import Server
from pagekeeper.cli.stats import stats_table
from pagekeeper.client import AdminClient, Answer, Client, Delta, Message
from pagekeeper.common.errors import PagekeeperError

_QUESTION = "What is the capital of France?"
_MAX_TOKENS = 64


def main() -> None:
    """Run the demo; exit 1 with the server's log when it fails."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            run(console, log)
        except PagekeeperError as error:
            console.print(log.read_text(), markup=False, highlight=False)
            sys.exit(f"pagekeeper: {error}")


def run(console: Console, log: Path) -> None:
    """The demo itself.

    Raises:
        PagekeeperError: the server does not start or does not answer.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        with console.status("starting cache manager, model runner and gateway"):
            server = stack.enter_context(Server("--pool-size", "256MiB", log=log))
        console.print(f"three processes serve on {server.address} after {time.monotonic() - began:.1f} s\n")
        console.print(f"[bold]{_QUESTION}[/bold]")
        with Client(server.address) as client:
            first = ask(client, console)
            console.print(first.summary(), style="dim", highlight=False, soft_wrap=True)
            again = collect(question(client), time.monotonic())
            console.print(f"asked again: {again.summary()}\n", style="dim", highlight=False, soft_wrap=True)
        with AdminClient(server.admin) as admin:
            console.print(stats_table(admin.stats()))
    console.print("\nstopped")


def question(client: Client) -> Answer:
    """Send the question."""
    return client.generate([Message("user", _QUESTION)], temperature=0, max_tokens=_MAX_TOKENS)


def ask(client: Client, console: Console) -> Result:
    """Ask the question and show the answer as it grows, over a bar of its tokens; without the bar when piped."""
    began = time.monotonic()
    answer = question(client)
    if not console.is_terminal:
        result = collect(answer, began, lambda _, delta: write(delta.text))
        write("\n")
        return result
    text = Text()
    bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console)
    task = bar.add_task("waiting for the first token", total=_MAX_TOKENS)

    def on_delta(result: Result, delta: Delta) -> None:
        text.append(printable(delta.text))
        bar.update(task, completed=len(result.candidates[0].token_ids), description=result.summary())

    with Live(Group(text, bar), console=console):
        result = collect(answer, began, on_delta)
    return result


if __name__ == "__main__":
    main()
