"""`prefix-train stream`: makes a store and looks whether it is whole."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs import compose
from configs.console import make_app, print_json
from configs.errors import UserError
from configs.schema import ModelConfig
from configs.wording import counted
from prefix_train.arguments import Json

if TYPE_CHECKING:
    from prefix_train.stream.manifest import BlockFile
    from prefix_train.stream.sources import Source
    from prefix_train.stream.store import Store

app = make_app("The streaming engine's store. Example: prefix-train stream build --model PATH --out STORE")

WEIGHTS = ("nf4", "bf16", "float32")
DTYPES = ("bfloat16", "float32")


@app.command("build")
def build_command(
    out: Annotated[Path, typer.Option(help="Folder of the store: new, or of a build that was interrupted.")],
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file, or a configuration (YAML) whose model is meant.")
    ] = None,
    random: Annotated[
        str | None, typer.Option(help="Instead of a model: random weights for a geometry in configs/geometries.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Matrices of the blocks: nf4, bf16 or float32.")] = "nf4",
    double_quant: Annotated[bool, typer.Option("--double-quant", help="NF4's scales in 8 bits, too.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="With nf4, of all else and of computing: bfloat16 or float32.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of --random's weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Convert a model for `engine: stream`, tensor by tensor; the same command goes on with an interrupted build."""
    from prefix_train.stream import build

    started = time.monotonic()
    source, choice = _source(model, random, weights, double_quant, dtype, seed)
    before: list[str] = []

    def progress(block: BlockFile, there: bool) -> None:
        before.extend([block.name] * there)
        line = f"{block.file}: {block.nbytes:,} bytes{', there already' if there else ''}"
        print(line, file=sys.stderr, flush=True)

    store = build.build(source, out, choice, progress)
    found = _summary(store) | {"found": len(before), "seconds": round(time.monotonic() - started, 2)}
    print(_describe(found) + "".join(f"\n{note}" for note in store.manifest.notes), flush=True)
    if as_json:
        print_json(found)


@app.command("check")
def check_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a store.", metavar="STORE")], as_json: Json = False
) -> None:
    """Read every byte of a store and compare hashes; status 2 and one line if a file is not what was written."""
    from prefix_train.stream.store import Store

    started = time.monotonic()
    found = _summary(Store.open(folder, check="hash"))
    found |= {"seconds": round(time.monotonic() - started, 2)}
    print(f"{_describe(found)}: every byte as it was written", flush=True)
    if as_json:
        print_json(found)


def _source(
    model: str | None, random: str | None, weights: str, double_quant: bool, dtype: str | None, seed: int
) -> tuple[Source, Any]:
    """What to convert, and to what. UserError for options that do not fit together."""
    if (model is None) == (random is None):
        raise UserError("give --model PATH, or --random GEOMETRY for random weights")
    if weights not in WEIGHTS:
        raise UserError(f"--weights {weights}: write one of {', '.join(WEIGHTS)}")
    if dtype is not None and (weights != "nf4" or dtype not in DTYPES):
        raise UserError(f"--dtype {dtype}: with --weights nf4, write one of {', '.join(DTYPES)}; else leave it out")
    if double_quant and weights != "nf4":
        raise UserError("--double-quant goes with --weights nf4")
    configured = _model(model, random)
    wanted: Any = dtype or {"bf16": "bfloat16", "float32": "float32"}.get(weights, configured.dtype)

    from dataclasses import replace

    from prefix_train.model import DTYPES as TORCH
    from prefix_train.stream import random_store, sources
    from prefix_train.stream.places import Choice

    configured = replace(configured, dtype=wanted)
    choice = Choice("nf4" if weights == "nf4" else "plain", TORCH[wanted], double_quant)
    if random is not None:
        return random_store.generate(configured, choice, seed), choice
    return sources.open_source(configured), choice


def _model(model: str | None, random: str | None) -> ModelConfig:
    """The model that an option names: by a configuration's section, or by its path."""
    if random is not None:
        from prefix_train.bench_pack import geometry_file

        return compose.load(geometry_file(random)).model
    if model is not None and model.endswith((".yaml", ".yml")):
        return compose.load(Path(model)).model
    return ModelConfig(path=model)


def _summary(store: Store) -> dict[str, Any]:
    """The store in figures."""
    layers = sum(block.nbytes for block in store.layers)
    parameters = sum(stored.elements for block in store.blocks for stored in block.tensors)
    return {
        "store": str(store.folder),
        "weights": store.manifest.weights,
        "double_quant": store.manifest.double_quant,
        "blocks": len(store.layers),
        "parameters": parameters,
        "bytes": sum(block.nbytes for block in store.blocks),
        "bytes_of_blocks": layers,
        "sha256": store.manifest.sha256,
    }


def _describe(found: dict[str, Any]) -> str:
    return (
        f"{found['store']}: {found['parameters']:,} parameters in {found['bytes']:,} bytes, of these "
        f"{found['bytes_of_blocks']:,} in {counted(found['blocks'], 'block')}, {found['seconds']} s"
    )
