"""`pagekeeper generate`: one request, streamed to the terminal, or as one JSON object."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagekeeper.cli.health import GATEWAY
from pagekeeper.cli.notice import RECONNECTING, CursorNotice, Notice

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from pagekeeper.client import Answer, Candidate, Delta, TokenLogprobs, Usage

# JSON has no infinity; this is what OpenAI's API says for it.
_JSON_MINUS_INFINITY = -9999.0
# C0 and C1 control characters but tab and newline.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue, or with --chat what to answer.")],
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    n: Annotated[int | None, typer.Option("-n", help="Number of answers.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="Search for the likeliest answers with so many beams.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that reach this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many tokens; 0 and -1 are off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of each token and of so many alternatives.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON and nothing else, once the answer is whole.")] = False,
    server: Annotated[str, typer.Option(help="Address of the gateway; several with commas between them.")] = GATEWAY,
) -> None:
    """Continue a text or answer a question, token by token."""
    from rich.console import Console

    from pagekeeper.client import BeamSearch, Client, Message

    if logprobs is not None and not as_json:
        raise typer.BadParameter("needs --json", param_hint="--logprobs")
    began = time.monotonic()
    notice = Notice()
    with (
        Client(server, on_retry=lambda _: notice.show()) as client,
        client.generate(
            [Message("user", prompt)] if chat else prompt,
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            logprobs=logprobs,
            beam_search=None if beam_width is None else BeamSearch(beam_width),
        ) as answer,
    ):
        console = Console(stderr=True)
        if as_json:
            print(json.dumps(collect(answer, began).as_json(), ensure_ascii=False, allow_nan=False))
            return
        result = (print_streaming if n in (None, 1) else print_candidates)(answer, began, console, notice)
        if console.is_terminal:
            console.print(result.summary(), style="dim", highlight=False)


@dataclass
class Result:
    """What a request has brought so far; `began` and `first_token_at` are readings of the monotonic clock."""

    began: float
    candidates: dict[int, "Candidate"]
    first_token_at: float | None = None
    seed: int | None = None
    usage: "Usage | None" = None

    def ttft_s(self) -> float | None:
        """Seconds from the start to the first token; None when there was none."""
        return None if self.first_token_at is None else self.first_token_at - self.began

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        ttft = self.ttft_s()
        return {
            "candidates": [_candidate_as_json(candidate) for _, candidate in sorted(self.candidates.items())],
            "usage": None if self.usage is None else asdict(self.usage),
            "seed": self.seed,
            "timing": {
                "ttft_s": None if ttft is None else round(ttft, 4),
                "total_s": round(time.monotonic() - self.began, 4),
            },
        }

    def summary(self) -> str:
        """One line about speed and cache, for people."""
        elapsed = time.monotonic() - self.began
        num_tokens = sum(len(candidate.token_ids) for candidate in self.candidates.values())
        parts = [f"{num_tokens} tokens", f"{num_tokens / elapsed:.1f} tokens/s"]
        ttft = self.ttft_s()
        if ttft is not None:
            parts.append(f"first after {ttft:.2f} s")
        if self.usage is not None:
            parts.append(f"prompt {self.usage.prompt_tokens} tokens ({self.usage.cached_tokens} cached)")
        return " · ".join(parts)


def collect(
    answer: "Answer", began: float, on_delta: Callable[[Result, "Delta"], None] = lambda result, delta: None
) -> Result:
    """Wait for the whole answer; `on_delta` sees each delta once the result contains it."""
    result = Result(began, answer.candidates)
    for delta in answer:
        result.first_token_at = result.first_token_at or time.monotonic()
        on_delta(result, delta)
    result.seed, result.usage = answer.seed, answer.usage
    return result


def print_streaming(answer: "Answer", began: float, console: "Console", notice: Notice) -> Result:
    """Print the one candidate's text to standard output as it comes.

    Args:
        answer: the request.
        began: reading of the monotonic clock when it was sent.
        console: where a spinner turns until the first token.
        notice: of a lost connection.
    """
    at_cursor = CursorNotice(console)

    def on_delta(_: Result, delta: "Delta") -> None:
        waiting.stop()
        notice.show = at_cursor.show
        at_cursor.hide()
        write(delta.text)

    try:
        with console.status("waiting for the first token") as waiting:
            notice.show = lambda: waiting.update(RECONNECTING)
            result = collect(answer, began, on_delta)
    finally:
        at_cursor.hide()
    write("\n")
    return result


def print_candidates(answer: "Answer", began: float, console: "Console", notice: Notice) -> Result:
    """Print several candidates one after the other; until they are whole, show all of them as they grow.

    Args:
        answer: the request.
        began: reading of the monotonic clock when it was sent.
        console: where they grow; nothing is shown if it is no terminal.
        notice: of a lost connection.
    """
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, transient=True, refresh_per_second=8) as live:
        notice.show = lambda: live.update(Text(RECONNECTING, style="dim"))
        result = collect(answer, began, lambda result, _: live.update(growing(result, console)))
    for _, candidate in sorted(result.candidates.items()):
        write(f"{label(candidate)} {candidate.text}\n")
    return result


def growing(result: Result, console: "Console") -> "Text":
    """The end of every candidate, as much of each as fits a terminal with all of them."""
    from rich.text import Text

    rows = max(1, (console.height - 2) // len(result.candidates) - 1)
    shown = Text()
    for _, candidate in sorted(result.candidates.items()):
        lines = Text(printable(candidate.text)).wrap(console, console.width)[-rows:]
        shown.append(f"{label(candidate)}\n", style="bold")
        shown.append_text(Text("\n").join(lines)).append("\n")
    return shown.append(result.summary(), style="dim")


def label(candidate: "Candidate") -> str:
    """What stands before a candidate's text: its index, and a hypothesis' score."""
    score = "" if candidate.score is None else f" {candidate.score:.4f}"
    return f"[{candidate.index}{score}]"


def _candidate_as_json(candidate: "Candidate") -> dict[str, Any]:
    """Index, text, token ids, finish reason and logprobs; the two numbers that not every answer has, if it has them."""
    fields = asdict(candidate)
    fields["logprobs"] = [_logprobs_as_json(token) for token in candidate.logprobs] or None
    for name in ("cumulative_logprob", "score"):
        if fields[name] is None:
            del fields[name]
        else:
            fields[name] = max(fields[name], _JSON_MINUS_INFINITY)
    return fields


def _logprobs_as_json(token: "TokenLogprobs") -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "logprob": max(token.logprob, _JSON_MINUS_INFINITY),
        "rank": token.rank,
        "top": [
            {"token_id": token_id, "logprob": max(logprob, _JSON_MINUS_INFINITY)}
            for token_id, logprob in token.top.items()
        ],
    }


def write(text: str) -> None:
    """Write a model's words to standard output at once."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """A model's words without what would steer a terminal: it may say anything, but not move the cursor."""
    return text.translate(_CONTROL)
