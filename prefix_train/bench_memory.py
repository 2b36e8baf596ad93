"""Memory of two whole updates of a large geometry's pack, and of saving afterwards, moment by moment.

Two, since the optimizer's moments exist from the first one's end on; the save, since it gathers what it writes. What
`prefix-train budget` predicts stands beside it. Runs in a process of its own, whose peaks are those of nothing else.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prefix_train import bench_process, bench_rows, budget, checkpoint, kernels
from prefix_train.bench_measure import Row, Watch
from prefix_train.bench_pack import Case, require_gpu
from prefix_train.dist import Ranks
from prefix_train.step import update

BOUND = 0.05
"""Most that the measured peak may be off from the predicted one."""

UPDATES = 2


class Peaks(Watch):
    """Tells memory of each moment of a row: what was allocated at its beginning and end, and at most in between.

    moments: in order; a name comes again where its phase does. bytes: what the device's allocator says (allocated, most
    allocated and most reserved since the last reset), and its reset.
    """

    def __init__(self, row: str, device: torch.device) -> None:
        super().__init__(row, device)
        self.moments: list[dict[str, Any]] = []
        self.number = 0
        self._moment: dict[str, Any] | None = None

    def begin(self, name: str) -> None:
        """The moment before ends here."""
        self.end()
        self._reset()
        self._moment = {"moment": name, "began_gib": self._bytes()[0] / budget.GIB, "at": time.perf_counter()}

    def end(self) -> None:
        """Of the present moment, if there is one."""
        if self._moment is None:
            return
        now, allocated, reserved = (each / budget.GIB for each in self._bytes())
        spent = time.perf_counter() - self._moment.pop("at")
        self._moment |= {"peak_gib": allocated, "reserved_gib": reserved, "ended_gib": now, "host_s": spent}
        self.moments.append(self._moment)
        self.say(f"{self._moment['moment']}: {allocated:.2f} GiB at most, {now:.2f} at its end")
        self._moment = None

    def in_update(self, name: str, pack: int) -> None:
        """What `Stepper.phase` calls."""
        self.begin(f"update {self.number}, {name}")

    def _bytes(self) -> tuple[int, int, int]:
        if self.device.type != "cuda":
            return 0, 0, 0
        cuda = torch.cuda
        return (
            cuda.memory_allocated(self.device),
            cuda.max_memory_allocated(self.device),
            cuda.max_memory_reserved(self.device),
        )

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def bench(case: Case, out: Path, snapshot: Path | None = None) -> dict[str, Any]:
    """`record` in a process of its own; `out` has what is known so far. Raises UserError where there is no GPU for a
    geometry of this size or `out` cannot be written, RuntimeError where the process does not end well."""
    require_gpu(case.config())
    bench_rows.write(out, {})
    given = {**asdict(case), "snapshot": None if snapshot is None else str(snapshot)}
    name = f"the recording process, of which {out} has what it told,"
    told = partial(bench_rows.write, out)
    return bench_process.run(name, "prefix_train.bench_memory", json.dumps(given), told=told)


def record(
    case: Case,
    device: torch.device,
    watch: Peaks | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
    snapshot: Path | None = None,
) -> dict[str, Any]:
    """Two updates and the save; peaks in GiB. tell: given what is known so far, after each. snapshot: a file for what
    the allocator did, in the format of pytorch.org/memory_viz. The prediction is judged where there is an allocator to
    ask."""
    watch = watch or Peaks("memory", device)
    pins = kernels.use_pins(dtype=case.config().model.dtype)
    if device.type == "cuda":
        kernels.compile_ahead(case.config(), device)
    row = Row("packed", case, device, watch)
    found: dict[str, Any] = {"case": asdict(case), "pins": pins, "predicted": row.predicted(), "moments": watch.moments}
    with _recorded(device, snapshot):
        for watch.number in range(1, UPDATES + 1):
            update(row.stepper, watch.number, 1e-5, row.batches)
            watch.end()
            tell(found)
        with tempfile.TemporaryDirectory() as folder:
            watch.begin("save")
            cursor = checkpoint.Cursor(UPDATES, 0, UPDATES, "")
            checkpoint.save(
                Path(folder),
                Ranks(0, 1, device, None),
                row.stepper.parameters,
                row.stepper.optimizer,
                cursor,
                row.config,
            )
            watch.end()
    peak = max(moment["peak_gib"] for moment in watch.moments)
    found["peak_gib"] = peak
    if row.offload is not None:
        found["pinned_gib"] = row.offload.figures().pinned_peak / budget.GIB
    if peak:
        found["off"] = peak / found["predicted"]["predicted_peak_gib"] - 1
        found["passed"] = abs(found["off"]) <= BOUND
    tell(found)
    return found


@contextmanager
def _recorded(device: torch.device, snapshot: Path | None) -> Iterator[None]:
    if snapshot is None or device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)


def text(found: dict[str, Any]) -> str:
    """For a person."""
    lines = [f"{'moment':<24} {'began':>8} {'peak':>8} {'reserved':>9} {'ended':>8} GiB"]
    lines += [
        f"{one['moment']:<24} {one['began_gib']:8.2f} {one['peak_gib']:8.2f} {one['reserved_gib']:9.2f} "
        f"{one['ended_gib']:8.2f}"
        for one in found["moments"]
    ]
    said = f"peak {found['peak_gib']:.2f} GiB, predicted {found['predicted']['predicted_peak_gib']:.2f}"
    if "off" in found:
        said += f": {found['off']:+.1%}, {'within' if found['passed'] else 'NOT within'} {BOUND:.0%}"
    return "\n".join([*lines, said])


def main() -> None:
    """Record the case that the command line gives; what is known is the last line."""
    told = json.loads(sys.argv[1])
    snapshot = told.pop("snapshot", None)
    case = Case(**{**told, "overrides": tuple(told["overrides"])})
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found, allow_nan=False), flush=True)

    record(case, device, tell=tell, snapshot=None if snapshot is None else Path(snapshot))


if __name__ == "__main__":
    main()
