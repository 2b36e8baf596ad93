"""The streaming engine on one GPU within a memory budget: whole updates of a large model with random weights, timed.

Each row stands beside its bound: the time that its bytes take through the same ring without computing, or its
arithmetic at the rate of the same matrix products alone, whichever is more. Rows run in a process of their own
(`bench_row`), which is begun anew where one has to be ended. No row runs before the gate (`bench_gate`) has passed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs import compose
from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import bench_rows
from prefix_train.bench_pack import geometry_file, require_gpu
from prefix_train.bench_rows import GATE
from prefix_train.stream import figures
from prefix_train.stream.figures import Misleading

PACK, ACCUMULATED = "pack", "accumulated"
"""`pack`: a prefix and its continuations. `accumulated`: its first examples, each with the whole prefix, computed one
after the other while a block is there. A row that is a number is one example of so many positions."""

ROWS = (
    *("1024", "2048", "4096", "8192", PACK, ACCUMULATED, "512", "128"),
    *(f"{row}@stream.host=pinned" for row in ("1024", "4096", PACK, ACCUMULATED, "8192", "2048", "512", "128")),
)
"""In the order of their worth. Behind `@` a row has options of its own, with commas between."""

OPTIONS = (
    "engine=stream",
    "stream.slots=3",
    "stream.readers=8",
    "memory.offload=auto",
    "memory.tile_rows=2048",
    "train.loss_chunk_rows=1024",
    "train.loss_chunk_words=8192",
)
"""As in configs/stream-32b-6gb.yaml, with as many readers as a server's processors allow."""

ALLOCATOR = "expandable_segments:True"
"""Of torch, unless the environment says otherwise: a cap on what it reserves leaves nothing for gaps."""

STARTING_S, ENDING_S = 120.0, 2.0
"""A process has so much time for its imports before its first row's time begins, and to end after its last."""


ALIKE = ("geometry", "budget_gib", "prefix", "continuations", "length")
"""What all rows of one file have in common."""


@dataclass(frozen=True)
class Case:
    """What is measured. store: of `stream build --random GEOMETRY`. alone: examples that the accumulated row computes.

    warm: updates after the first; none: 3 up to `many` positions, 2 above. cold: the page cache is dropped before the
    first update. seconds: a row that takes longer is ended. profile: tell the parts of an update.
    """

    geometry: str
    store: str
    budget_gib: float = 6.0
    prefix: int = 4096
    continuations: int = 32
    length: int = 128
    alone: int = 4
    warm: int | None = None
    many: int = 2048
    cold: bool = False
    seconds: float = 90.0
    overrides: tuple[str, ...] = ()
    profile: bool = True

    def config(self, more: Sequence[str]) -> Config:
        """The geometry's configuration with this case's changes, and a row's own."""
        own = ("stream.store=.", f"stream.budget_gib={self.budget_gib}")  # a path is no text to parse: see below
        config = compose.load(geometry_file(self.geometry), [*OPTIONS, *own, *self.overrides, *more])
        stream = dataclasses.replace(config.stream, store=self.store)
        return dataclasses.replace(config, stream=stream)


def parse(row: str) -> tuple[str, tuple[str, ...]]:
    """A row's kind and its own options. UserError for what is none."""
    kind, at, options = row.partition("@")
    overrides = tuple(options.split(",")) if at else ()
    if not (kind in (PACK, ACCUMULATED) or (kind.isdecimal() and int(kind) > 3)) or any(
        "=" not in o for o in overrides
    ):
        raise UserError(
            f"--row {row}: write a number of positions (at least 4), {PACK} or {ACCUMULATED}, and options behind it as "
            "in 1024@stream.host=pinned"
        )
    return kind, overrides


def bench(case: Case, rows: Sequence[str], out: Path, seconds: float = float("inf")) -> dict[str, Any]:
    """Run the gate, then each of `rows` (`gate`: no more than that), and write to `out` what there is at once.

    Rows that `out` has already stay, the same row excepted; so does a gate that has passed for the same sources and
    kernels. A row that fails leaves its part and lets the next one run; one for which the allocator had too little is
    tried once more without blocks that stay. seconds: of all of it; rows that have no time left do not run. Raises
    UserError where `out` or the store is something else, or a GPU is missing; RuntimeError where the gate failed, and
    at the end where a row did, or where rows mislead.
    """
    until = time.monotonic() + seconds
    rows = [row for row in rows if row != GATE]
    for row in rows:
        case.config(parse(row)[1])
    require_gpu(case.config(()))
    found = bench_rows.read(out)
    _require_alike(out, found, case)
    gated = bench_rows.gated(case.geometry, case.config(())) | {"engine": "stream"}
    bench_rows.write(out, found)
    if not found[GATE].get("passed") or found[GATE].get("of") != gated:
        answers = list(_process([GATE], case, until))
        found[GATE] = {"of": gated, "passed": False, **(answers[-1] if answers else {})}
        bench_rows.write(out, found)
    if not found[GATE]["passed"]:
        raise RuntimeError(f"no figure without the correctness gate: see {out}")
    failed = _rows(list(rows), case, out, found, until)
    try:
        text(found)
    except Misleading as error:
        failed.append(str(error))
    if failed:
        raise RuntimeError("; ".join(failed))
    return found


def _require_alike(out: Path, found: dict[str, Any], case: Case) -> None:
    """Rows of one file are of one model and one budget: else they would stand in one table."""
    mine = asdict(case)
    for row in found["rows"]:
        there = row.get("case", mine)
        if differ := [name for name in ALIKE if there.get(name) != mine[name]]:
            raise UserError(f"--out {out} holds rows with another {' and '.join(differ)}: give another file")


def _rows(waiting: list[str], case: Case, out: Path, found: dict[str, Any], until: float) -> list[str]:
    """Measure them, in processes that each take as many as they can; what failed."""
    failed = []
    while waiting and time.monotonic() < until:
        last: dict[str, Any] = {}
        begun = waiting[0]
        for last in _process(waiting, case, until):
            begun = last["row"]
            _keep(out, found, last)
            if "partial" not in last or last.get("failed"):
                waiting.remove(begun)
                begun = ""
                failed += [f"{last['row']}: {said}" for said in last.get("failed", ())]
                waiting += _again(last)
        if begun and begun in waiting:
            waiting.remove(begun)
            failed.append(f"{begun}: it was ended, or its process ended: what it measured is kept")
    found["not_run"] = waiting
    bench_rows.write(out, found)
    return failed + [f"{row}: no time was left" for row in waiting]


def _again(row: dict[str, Any]) -> list[str]:
    """A row that had too little memory, without blocks that stay."""
    if "stream.resident_blocks" in row["row"] or not any("OutOfMemory" in said for said in row.get("failed", ())):
        return []
    return [f"{row['row']}{',' if '@' in row['row'] else '@'}stream.resident_blocks=0"]


def _keep(out: Path, found: dict[str, Any], row: dict[str, Any]) -> None:
    found["rows"] = [*(old for old in found["rows"] if old["row"] != row["row"]), row]
    found["ratios"] = ratios(found["rows"])
    bench_rows.write(out, found)


def _process(rows: Sequence[str], case: Case, until: float) -> Iterator[dict[str, Any]]:
    """What a measuring process says, line by line, until it ends or a row's time is up."""
    told = {"case": asdict(case), "rows": list(rows), "started": time.time()}
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", ALLOCATOR)}
    program = [sys.executable, "-m", "prefix_train.stream.bench_row", json.dumps(told)]
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as running:
        threading.Thread(target=_read, args=(running, lines), daemon=True).start()
        try:
            ends = time.monotonic() + STARTING_S + case.seconds
            while (line := _next(lines, min(ends, until))) is not None:
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    if "partial" not in answer or answer.get("failed"):
                        ends = time.monotonic() + case.seconds
                    yield answer
        finally:
            if running.poll() is None:
                try:
                    running.wait(ENDING_S)
                except subprocess.TimeoutExpired:
                    os.killpg(running.pid, signal.SIGKILL)


def _read(running: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert running.stdout is not None
    for line in running.stdout:
        lines.put(line)
    lines.put(None)


def _next(lines: queue.SimpleQueue[str | None], ends: float) -> str | None:
    """The next line; none at the process's end, and where the time is up."""
    try:
        return lines.get(timeout=max(0.0, ends - time.monotonic()))
    except queue.Empty:
        return None


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What sharing saves beside amortised reading: all the pack's examples, accumulated block by block, over it; by the
    pack's row, for each that has an accumulated one with the same options."""
    whole = {row["row"]: row for row in rows if "partial" not in row}
    found = {}
    for name, pack in whole.items():
        kind, at, options = name.partition("@")
        other = whole.get(f"{ACCUMULATED}{at}{options}")
        if kind == PACK and other is not None:
            found[name] = other["all_s"] / pack["all_s"]
    return found


def parts(row: dict[str, Any]) -> str:
    """Where an update's time goes, in a line."""
    parts = row["parts"]
    text = f"without copies {parts['computing_s']:.2f} s"
    if "kinds_s" in parts:
        kinds = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in parts["kinds_s"].items())
        text += f", its kernels {parts['kernels_s']:.2f} s in {parts['launches']:,} launches ({kinds})"
    told = ", ".join(f"{name} {count}" for name, count in row["allocator"].items() if count)
    return text + (f"; torch's allocator in {counted(len(row['warm_s']), 'update')}: {told}" if told else "")


def text(found: dict[str, Any]) -> str:
    """The figures for a person. Raises Misleading for rows that must not stand in one table."""
    whole = [row for row in found["rows"] if "partial" not in row]
    warm = [figure(row) for row in whole]
    lines = [figures.table(warm)] if warm else []
    for row in whole:
        bound, memory = row["bound"], row["memory"]
        lines.append(
            f"{row['row']}: {row['ratio']:.2f} x its bound (reading {bound['read_s']:.2f} s at "
            f"{max(row['copies_gb_s']):.1f} GB/s, computing {bound['compute_s']:.2f} s at {row['matrix_tflops']:.0f} "
            f"TFLOP/s); first {row['first_s']:.2f} s, then {row['min_s']:.2f} to {row['max_s']:.2f}; "
            f"{row['plan']['resident_blocks']} blocks stay, {row['blocks_covered']} of {row['blocks']} covered"
            + (f"; driver {memory['driver_gib']:.2f} GiB" if "driver_gib" in memory else "")
        )
        if "parts" in row:
            lines.append(f"{row['row']}: {parts(row)}")
        elif "parts_failed" in row:
            lines.append(f"{row['row']}: its parts could not be measured: {row['parts_failed']}")
    lines += [
        f"block-major accumulation of all examples of {name} takes {ratio:.2f} times the pack"
        for name, ratio in found.get("ratios", {}).items()
    ]
    return "\n".join(lines)


def figure(row: dict[str, Any]) -> figures.Row:
    """As the table has it. Its peak is the driver's reading where there is one."""
    memory = row["memory"]
    peak = memory.get("driver_gib", row["plan"]["needed_gib"])
    return figures.Row(
        name=row["row"],
        positions=row["positions"],
        logical=row["logical"],
        targets=row["targets"],
        seconds=row["median_s"],
        nbytes=row["read_bytes"],
        bound_s=row["bound"]["s"],
        budget_gib=row["plan"]["budget_gib"],
        peak_bytes=int(peak * (1 << 30)),
        warm=row["host"] == "pinned" or row["page_cache"]["warm"] > 0.99,
    )
