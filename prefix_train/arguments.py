"""What commands share: arguments, how a configuration is read, and how an answer is printed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from configs import compose
from configs.console import print_json
from configs.schema import Config

Where = Annotated[Path, typer.Argument(help="Configuration (YAML) or run folder.")]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, as in `train.lr=1e-4`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]


def read(where: Path, overrides: list[str] | None) -> Config:
    """The configuration at `where`, a YAML file or a run folder, with `key=value` changes."""
    if where.is_dir():
        return compose.with_changes(compose.from_run(where), overrides or [])
    return compose.load(where, overrides or [])


def positive(number: float | None) -> float | None:
    """`number`, which is none or of this world: above zero and finite."""
    if number is not None and not 0 < number < math.inf:
        raise typer.BadParameter(f"{number} is no size: give a number above 0")
    return number


def answer(document: dict[str, Any], text: str, as_json: bool) -> None:
    """Print what a person reads, then under --json what a program reads."""
    print(text, flush=True)
    if as_json:
        print_json(document)
