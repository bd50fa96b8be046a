"""`pagekeeper stats`: the cache manager's numbers as a table, live, or as JSON."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

ADMIN = "127.0.0.1:50052"


def stats(
    server: Annotated[str, typer.Option(help="Address of the admin port.")] = ADMIN,
    as_json: Annotated[bool, typer.Option("--json", help="JSON and nothing else.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Every second, until Ctrl-C.")] = False,
) -> None:
    """Show what the cache holds and shares."""
    from rich.console import Console
    from rich.live import Live

    from pagekeeper.client import AdminClient

    console = Console()
    with AdminClient(server) as admin:
        if not watch:
            numbers = admin.stats()
            if as_json:
                print(json.dumps(numbers, indent=2))
            else:
                console.print(stats_table(numbers))
        elif as_json:
            for numbers in admin.watch_stats():
                print(json.dumps(numbers), flush=True)
        else:
            with Live(console=console, auto_refresh=False) as live:
                for numbers in admin.watch_stats():
                    live.update(stats_table(numbers), refresh=True)


def stats_table(numbers: dict[str, Any]) -> "RenderableType":
    """The numbers for people, one row for each question that one asks of a cache.

    Args:
        numbers: what `AdminClient.stats` returns.
    """
    from rich.table import Table

    pool, usage, prefix, ops = numbers["pool"], numbers["usage"], numbers["prefix"], numbers["ops"]
    table = Table(show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("pool", _pool(pool))
    table.add_row(
        "blocks",
        f"{pool['free_blocks']:,} free ({pool['cached_blocks']:,} of them cached), {pool['leased_blocks']:,} leased, "
        f"{pool['sealed_blocks']:,} sealed, {pool['quarantined_blocks']:,} quarantined",
    )
    table.add_row("in use", _usage(usage))
    table.add_row(
        "prefix hits",
        f"{prefix['hit_tokens']:,} of {prefix['queried_tokens']:,} tokens in {prefix['lookups']:,} lookups "
        f"and {prefix['reopens']:,} reopens; {prefix['evictions']:,} evictions",
    )
    table.add_row(
        "operations",
        f"{ops['seals']:,} seals, {ops['folds']:,} folds, {ops['forks']:,} forks, "
        f"{ops['copy_on_write']:,} copies on write, {ops['shortages']:,} shortages",
    )
    for session in numbers["sessions"]:
        table.add_row(
            f"session {session['epoch']}", f"runner {session['runner_id']}, pid {session['pid']}, {session['state']}"
        )
    return table


def _pool(pool: dict[str, Any]) -> str:
    if not pool["block_size"]:
        return f"{pool['backend']}, no runner has attached yet"
    size = pool["total_blocks"] * pool["block_bytes"] / 2**20
    return f"{pool['backend']}, {pool['total_blocks']:,} blocks of {pool['block_size']} tokens, {size:,.0f} MiB"


def _usage(usage: dict[str, Any]) -> str:
    if not usage["sequences"]:
        return "nothing"
    return (
        f"{usage['sequences']:,} sequences, {usage['logical_tokens']:,} tokens, {usage['physical_blocks']:,} blocks "
        f"with {usage['utilization']:.1%} of their slots filled; sharing saves {usage['sharing_saved']:.1%}"
    )
