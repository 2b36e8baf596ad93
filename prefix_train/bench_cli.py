"""`prefix-train bench`: measures, and gives no figure without the check that what was measured is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from configs import compose, runfolder
from configs.console import make_app
from configs.errors import UserError
from prefix_train.arguments import Json, Overrides, answer, positive

app = make_app("Measure. Example: prefix-train bench cpu --out cpu.json")


@app.command("cpu")
def bench_cpu_command(
    config: Annotated[Path, typer.Option(help="Configuration with a model to build.")] = Path("configs/digits.yaml"),
    prefix: Annotated[int, typer.Option(help="Tokens of the shared prefix.")] = 2048,
    continuations: Annotated[int, typer.Option(help="Examples that branch off it.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of each continuation.")] = 32,
    repeats: Annotated[int, typer.Option(help="Warm updates that are timed.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Packed against standalone on this machine's CPU; no figure unless gradients agree in the same run."""
    from prefix_train import bench

    found = bench.cpu(compose.load(config), prefix, continuations, length, repeats)
    if out is not None:
        runfolder.write_json(out, found)
    answer(found, bench.text(found), as_json)


@app.command("pack")
def bench_pack_command(
    geometry: Annotated[str, typer.Option(help="Name in configs/geometries, or a YAML file.")] = "qwen3.6-27b",
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the shared prefix.")] = 64_000,
    continuations: Annotated[str, typer.Option(help="Examples that branch off it: COUNTxTOKENS.")] = "80x1000",
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="packed, standalone, flex, gate (repeat); all.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the geometry has.")] = None,
    warm: Annotated[int, typer.Option(min=1, help="Updates after the first that are timed.")] = 2,
    alone: Annotated[int, typer.Option(min=1, help="Examples in an update of the standalone row.")] = 4,
    profile: Annotated[bool, typer.Option(help="Tell which kernels one more update launches.")] = True,
    out: Annotated[Path, typer.Option(help="JSON file that the rows are added to.")] = Path("bench-pack.json"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """One real update of a large geometry on one GPU, packed and alone; no figure unless the gate has passed."""
    from prefix_train import bench_pack, bench_rows

    if unknown := set(rows or ()) - set(bench_pack.CHOICES):
        raise UserError(f"--row {min(unknown)}: rows are {', '.join(bench_pack.CHOICES)}")
    count, length = bench_pack.continuations(continuations)
    case = bench_pack.Case(
        geometry,
        prefix,
        count,
        length,
        layers,
        warm,
        min(alone, count),
        profile=profile,
        overrides=tuple(overrides or ()),
    )
    found = bench_pack.bench(case, tuple(rows or bench_pack.ROWS), out)
    answer(found, bench_rows.text(found), as_json)


@app.command("memory")
def bench_memory_command(
    geometry: Annotated[str, typer.Option(help="Name in configs/geometries, or a YAML file.")] = "qwen3.6-27b",
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the shared prefix.")] = 64_000,
    continuations: Annotated[str, typer.Option(help="Examples that branch off it: COUNTxTOKENS.")] = "80x1000",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the geometry has.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file for what is recorded.")] = Path("bench-memory.json"),
    snapshot: Annotated[Path | None, typer.Option(help="File for what the allocator did, as torch dumps it.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Memory of two updates and of the save after them, moment by moment, beside what was predicted."""
    from prefix_train import bench_memory, bench_pack

    count, length = bench_pack.continuations(continuations)
    case = bench_pack.Case(geometry, prefix, count, length, layers, overrides=tuple(overrides or ()))
    found = bench_memory.bench(case, out, snapshot)
    answer(found, bench_memory.text(found), as_json)
    if not found.get("passed", True):
        raise typer.Exit(1)


@app.command("stream")
def bench_stream_command(
    store: Annotated[Path, typer.Option(help="Store of `prefix-train stream build --random GEOMETRY`.")],
    geometry: Annotated[str, typer.Option(help="Name in configs/geometries, or a YAML file.")] = "qwen3-32b",
    budget_gib: Annotated[float, typer.Option(callback=positive, help="Most GPU memory, in GiB.")] = 6.0,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--row", help="Positions of one example, pack, accumulated, gate; `@key=value` behind it (repeat)."
        ),
    ] = None,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the pack's shared prefix.")] = 4096,
    continuations: Annotated[str, typer.Option(help="Examples that branch off it: COUNTxTOKENS.")] = "32x128",
    alone: Annotated[int, typer.Option(min=1, help="Examples of the pack that the accumulated row computes.")] = 4,
    warm: Annotated[int | None, typer.Option(min=1, help="Updates after the first; 3 for small rows, 2 above.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the store from the page cache before the first.")] = False,
    row_seconds: Annotated[float, typer.Option(callback=positive, help="A row that takes longer is ended.")] = 90.0,
    seconds: Annotated[float, typer.Option(callback=positive, help="Time for all of it.")] = 86_400.0,
    out: Annotated[Path, typer.Option(help="JSON file that the rows are added to.")] = Path("bench-stream.json"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Whole updates of a large geometry within a memory budget, beside their bound; no figure without the gate."""
    from prefix_train import bench_pack
    from prefix_train.stream import bench

    count, length = bench_pack.continuations(continuations)
    case = bench.Case(
        geometry,
        str(store),
        budget_gib,
        prefix,
        count,
        length,
        min(alone, count),
        warm,
        cold=cold,
        seconds=row_seconds,
        overrides=tuple(overrides or ()),
    )
    found = bench.bench(case, tuple(rows or bench.ROWS), out, seconds)
    answer(found, bench.text(found), as_json)
