"""`prefix-train export` and `prefix-train check`: what a run gives away, and whether it is what was trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from configs import runfolder
from configs.console import print_json
from configs.errors import UserError
from configs.wording import counted
from prefix_train.arguments import Json

WEIGHTS = ("model", "store")
DTYPES = ("bfloat16", "float32")

Examples = Annotated[int, typer.Option(min=1, help="Held-out examples to compare on.")]


def export_command(
    run_folder: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; in the run folder by default.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="The whole model with the adapter merged into it.")] = False,
    weights: Annotated[
        str | None, typer.Option(help="Merge into the weights of `model`, the run's model.path, or of its `store`.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of merged files: bfloat16 or float32; as in training.")] = None,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Most 10^9 bytes in one of the merged files.")] = 5.0,
    check: Annotated[bool, typer.Option("--check", help="Then do what `prefix-train check` does.")] = False,
    examples: Examples = 8,
    as_json: Json = False,
) -> int:
    """Write the adapter in PEFT's format, or with --merged the whole model in transformers', a block at a time.

    Where everything was trained: the whole model, in float32, or with --merged in the dtype of training.
    """
    if not merged and (weights or dtype):
        raise UserError("--weights and --dtype are for a merged model: add --merged")
    if weights not in (None, *WEIGHTS):
        raise UserError(f"--weights {weights}: write {' or '.join(WEIGHTS)}")
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype {dtype}: write {' or '.join(DTYPES)}")
    from prefix_train.exports import run
    from prefix_train.exports.merge import Dtype, Merging

    dtype = cast(Dtype | None, dtype)
    merging = Merging("store" if weights == "store" else "model", dtype, int(shard_gb * 1e9)) if merged else None
    done = run.export_run(run_folder, out, merging)
    document: dict[str, Any] = asdict(done) | {"folder": str(done.folder)}
    print(f"{done.folder}: {counted(done.tensors, 'tensor')}, {done.parameters:,} parameters", flush=True)
    if check:
        return _check(done.folder, run_folder, examples, document, as_json)
    if as_json:
        print_json(document)
    return 0


def check_command(
    folder: Annotated[Path, typer.Argument(help="Folder that `prefix-train export` wrote.")],
    run_folder: Annotated[
        Path | None, typer.Option("--run", help="The run that it is of; the folder it lies in by default.")
    ] = None,
    examples: Examples = 8,
    as_json: Json = False,
) -> int:
    """Load an export with transformers and PEFT alone, and compare it with its run.

    Example: prefix-train check RUN/adapter
    """
    run_of = run_folder or folder.absolute().parent
    if not (run_of / runfolder.CONFIG).is_file():
        raise UserError(f"{run_of} is no run folder: say with --run RUN which run {folder} is of")
    return _check(folder, run_of, examples, {}, as_json)


def _check(folder: Path, run_folder: Path, examples: int, more: dict[str, Any], as_json: bool) -> int:
    """1 where the export is not what was trained."""
    from prefix_train.exports import check, run

    found = run.check_export(folder, run_folder, examples)
    print(check.table(found), flush=True)
    if as_json:
        print_json(more | {"check": found})
    return 0 if found["passed"] else 1
