"""`pagekeeper model`: fetch the demo model, inspect any model."""

import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gateway.model import load_model
from pagekeeper.cli.demo_model import fetch_demo_model

app = typer.Typer(
    help="Fetch the demo model, inspect any model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class DemoModel(StrEnum):
    """Models that can be fetched."""

    SMOLLM2 = "smollm2"


@app.command()
def fetch(model: Annotated[DemoModel, typer.Argument(help="The only one so far is smollm2.")]) -> None:
    """Download a demo model once and print its directory."""
    del model
    print(fetch_demo_model())


@app.command()
def inspect(path: Annotated[Path, typer.Argument(help="A model directory or a GGUF file.")]) -> None:
    """Show what a model holds, and whether it can be served."""
    from model_runner.model.files import open_model  # imports torch
    from model_runner.model.load import check_weights

    files = open_model(path)
    config = files.config
    windows = [window for window in config.sliding_windows if window is not None]
    shapes = [shape for file in files.weights for shape in file.shapes().values()]
    rows = {
        "architecture": config.architecture,
        "parameters": f"{sum(map(math.prod, shapes)):,}",
        "weights": ", ".join(f"{file.name} ({file.stat().st_size / 2**20:,.0f} MiB)" for file in files.weight_paths),
        "tensors": ", ".join(f"{count:,} {kind}" for kind, count in files.tensor_types.most_common()),
        "layers": f"{config.num_layers}",
        "hidden size": f"{config.hidden_size:,}",
        "heads": f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} for K and V",
        "vocabulary": f"{config.vocab_size:,}",
        "context": f"{config.max_position_embeddings:,} tokens",
        "rotary positions": str(config.rope),
        "sliding window": f"{windows[0]:,} tokens in {len(windows)} of {config.num_layers} layers"
        if windows
        else "none",
        "KV cache": f"{config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4:,} bytes a token in float32",
        "end tokens": ", ".join(map(str, config.eos_token_ids)) or "none",
    }
    _print_table(rows)
    check_weights(files)
    load_model(path)
    print("can be served")


def _print_table(rows: dict[str, str]) -> None:
    if not sys.stdout.isatty():
        for name, value in rows.items():
            print(f"{name}: {value}")
        return
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
