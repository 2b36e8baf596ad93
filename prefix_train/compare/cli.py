"""`prefix-train compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from configs.console import print_json
from prefix_train.arguments import Json


def compare_command(
    stores: Annotated[Path, typer.Option(help="Folder for stores and shards of random weights; new ones are made.")],
    sizes: Annotated[
        list[str] | None, typer.Option("--size", help="LAYERSxPOSITIONS (repeat); 4x512, 24x512 and 24x2048.")
    ] = None,
    rivals: Annotated[
        list[str] | None, typer.Option("--rival", help="ours, peft, block-streamer (repeat); all.")
    ] = None,
    geometry: Annotated[str, typer.Option(help="Name in configs/geometries, or a YAML file.")] = "qwen3-32b",
    budget_gib: Annotated[float, typer.Option(min=0.001, help="Most GPU memory of each, in GiB.")] = 8.0,
    packages: Annotated[Path | None, typer.Option(help="Folder in which rivals are installed, apart.")] = None,
    warm: Annotated[int, typer.Option(min=1, help="Updates after the first that are timed.")] = 3,
    out: Annotated[Path, typer.Option(help="JSON file that the rows are added to.")] = Path("compare.json"),
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes as key=value.")] = None,
    as_json: Json = False,
) -> None:
    """The streaming engine beside PEFT with bitsandbytes and BlockStreamer: same host, weights, example and budget."""
    from prefix_train.compare import table
    from prefix_train.compare.case import Case

    case = Case(geometry, 1, 4, budget_gib, str(stores), warm, tuple(overrides or ()))
    cases = table.sizes(sizes or ["4x512", "24x512", "24x2048"], case)
    found = table.compare(cases, rivals or list(table.RIVALS), out, packages, lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(found)
    else:
        typer.echo(table.text(found))
