"""What `generate` shows of a lost connection."""

import io
import time

import pytest
from rich.console import Console

from pagekeeper.cli.generate import print_candidates, print_streaming
from pagekeeper.cli.notice import RECONNECTING, CursorNotice, Notice
from pagekeeper.client import Client
from tests.fakes.scripted_gateway import PROMPT, Cut, ScriptedGateway, Story, text_of
from tests.unit.cli.fakes import serving

SAVE, RESTORE = "\x1b7", "\x1b8"


def console(*, is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=60), file


def test_a_notice_at_the_cursor_is_shown_once_and_wiped_out_once() -> None:
    terminal, file = console()
    notice = CursorNotice(terminal)
    notice.hide()
    assert file.getvalue() == ""
    notice.show()
    notice.show()
    assert file.getvalue().count(RECONNECTING) == 1
    notice.hide()
    notice.hide()
    assert (file.getvalue().count(SAVE), file.getvalue().count(RESTORE)) == (1, 1)
    assert file.getvalue().endswith(f"{RESTORE}\x1b[K")


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    pipe, file = console(is_terminal=False)
    notice = CursorNotice(pipe)
    notice.show()
    notice.hide()
    assert file.getvalue() == ""


@pytest.mark.parametrize("after", [0, 3])
def test_a_lost_connection_is_shown_until_the_answer_goes_on(after: int, capsys: pytest.CaptureFixture[str]) -> None:
    terminal, file = console()
    notice = Notice()
    gateway = ScriptedGateway(Story((6,), (False,)), [Cut(after)])
    with serving(gateway=gateway) as address, Client(address, on_retry=lambda _: notice.show()) as client:
        client._route.rng = lambda: 4.0  # long enough for a spinner to turn
        print_streaming(client.generate(PROMPT), time.monotonic(), terminal, notice)
    assert capsys.readouterr().out == text_of(0, 6, is_whole=True) + "\n"
    assert RECONNECTING in file.getvalue()
    assert file.getvalue().count(SAVE) == file.getvalue().count(RESTORE) == (1 if after else 0)


def test_candidates_that_grow_side_by_side_give_way_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, file = console()
    notice = Notice()
    gateway = ScriptedGateway(Story((6, 2), (False, False)), [Cut(3)])
    with serving(gateway=gateway) as address, Client(address, on_retry=lambda _: notice.show()) as client:
        client._route.rng = lambda: 6.0
        print_candidates(client.generate(PROMPT, n=2), time.monotonic(), terminal, notice)
    assert capsys.readouterr().out == "".join(f"[{i}] {text_of(i, n, is_whole=True)}\n" for i, n in enumerate((6, 2)))
    assert RECONNECTING in file.getvalue()
