"""A pack of a large model's geometry on one GPU: whole updates with random weights, timed, beside the same examples
alone and beside FlexAttention.

Each row runs in a process of its own (`bench_measure`), so that its first update is a cold one and its peak memory its
own, and tells what it has as it goes: a row that is cut short leaves what it measured. No row runs before the gate
(`bench_gate`) has passed; one that has passed holds for all rows of the same sources and kernels.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from configs import compose
from configs.errors import UserError
from configs.schema import Config
from prefix_train import bench_process, bench_rows
from prefix_train.bench_rows import GATE
from prefix_train.geometry import Geometry, read_config

ROWS = ("packed", "standalone", "flex")
"""`packed`: the pack with the configuration's kernels. `standalone`: its first examples, each alone, with the same.
`flex`: the pack with FlexAttention."""

CHOICES = (*ROWS, GATE)
"""The gate alone is for rows that run side by side, each with a copy of its file."""

CPU_PARAMETERS = 100_000_000
"""Most parameters of a model that is measured without a GPU."""


@dataclass(frozen=True)
class Case:
    """What is measured. alone: examples that run in a standalone row. warm: updates after the first. peak_tflops: what
    utilisation is a share of; 989 is an H100's or H200's data sheet for dense bfloat16. profile: one more update tells
    which kernels ran."""

    geometry: str
    prefix: int
    continuations: int
    length: int
    layers: int | None = None
    warm: int = 2
    alone: int = 4
    peak_tflops: float = 989.0
    profile: bool = True
    overrides: tuple[str, ...] = ()

    def config(self) -> Config:
        """The geometry's configuration with this case's changes."""
        config = compose.load(geometry_file(self.geometry), self.overrides)
        build = dict(config.model.build)
        if self.layers is not None:
            build["num_hidden_layers"] = self.layers
        pack = dataclasses.replace(config.pack, max_positions=self.prefix + self.continuations * self.length)
        return dataclasses.replace(config, pack=pack, model=dataclasses.replace(config.model, build=build))


def geometry_file(name: str) -> Path:
    """A configuration by its name in configs/geometries, or by its path. UserError names those that there are."""
    folder = Path(compose.__file__).parent / "geometries"
    path = folder / f"{name}.yaml"
    if path.is_file():
        return path
    if Path(name).is_file():
        return Path(name)
    known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise UserError(f"--geometry {name}: neither a file nor one of {known}")


def continuations(text: str) -> tuple[int, int]:
    """`80x1000`: so many examples, and tokens of each."""
    count, _, length = text.partition("x")
    if not (count.isdecimal() and length.isdecimal() and int(count) and int(length)):
        raise UserError(f"--continuations {text!r}: write COUNTxTOKENS, as in 80x1000")
    return int(count), int(length)


def bench(case: Case, rows: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Run the gate, then each of `rows` besides, and write to `out` whatever there is as soon as it is there.

    Rows that `out` has already stay, the same row excepted; so does a gate that has passed for the same sources and
    kernels. A row that fails leaves its part and lets the next one run. Raises UserError where `out` holds something
    else or cannot be written, and where there is no GPU for a geometry of this size; RuntimeError where the gate or,
    at the end, a row has failed.
    """
    require_gpu(case.config())
    found, gated = bench_rows.read(out), bench_rows.gated(case.geometry, case.config())
    bench_rows.write(out, found)
    if not found[GATE].get("passed") or found[GATE].get("of") != gated:
        found[GATE] = {"of": gated, **_in_a_process(GATE, case)}
        bench_rows.write(out, found)
    if not found[GATE]["passed"]:
        raise RuntimeError(f"no figure without the correctness gate: see {out}")
    failed = []
    for row in (row for row in rows if row != GATE):
        try:
            measured = _in_a_process(row, case, lambda part, row=row: _keep(out, found, row, part, True))  # type: ignore[misc]
        except RuntimeError as error:
            failed.append(str(error))
            continue
        _keep(out, found, row, measured, False)
    if failed:
        raise RuntimeError("; ".join(failed))
    return found


def _keep(out: Path, found: dict[str, Any], row: str, measured: dict[str, Any], partial: bool) -> None:
    bench_rows.add(found, {"row": row, **({"partial": True} if partial else {}), **measured})
    bench_rows.write(out, found)


def require_gpu(config: Config) -> None:
    """Raise UserError where this machine's CPU would have to train more than a test's model."""
    parameters = sum(Geometry.of(read_config(config.model)).parameters.values())
    if not torch.cuda.is_available() and parameters > CPU_PARAMETERS:
        raise UserError(
            f"a geometry of {parameters:,} parameters is measured on a GPU, and there is no CUDA device here; "
            "on a CPU: prefix-train bench cpu"
        )


def _in_a_process(row: str, case: Case, told: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """The last line that the measuring process writes; each line before it is `told` at once."""
    given = {**asdict(case), "started": time.time()}
    name = f"{row}: the measuring process"
    return bench_process.run(name, "prefix_train.bench_measure", row, json.dumps(given), told=told)
