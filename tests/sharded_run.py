"""Two ranks for the checks of `tests.sharded_checks`: `python -m tests.sharded_run OUT.json fork|spawn SCENARIO...`.

Forked ranks import nothing again. On GPUs they are spawned: flash-linear-attention asks CUDA for its device as
transformers imports it, and after that no forked process can use CUDA.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from prefix_train import dist
from tests import fixed_order
from tests.lives import free_port
from tests.sharded_checks import CHECKS, FAULTS
from tests.standins import ROOT

LONGEST_S = 200.0
"""For all checks of a scenario."""
PRINTED = 4000
"""Letters of what a rank has printed that are told, the last ones."""


@dataclass(frozen=True)
class Told:
    """What one rank left. checks: the traceback of each that it came to, empty where it passed. ended: how its process
    ended and the last that it printed, empty where it ended well."""

    checks: dict[str, str]
    ended: str


Outcomes = dict[str, list[Told]]
"""By scenario and rank."""


def run_rank(rank: int, port: int, scenario: str, out: Path) -> None:
    """One rank: every check of the scenario (`checks`: all; or the name of one), each with its outcome in `out`."""
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    checks = CHECKS if scenario == "checks" else {scenario: (CHECKS | FAULTS)[scenario]}
    found: dict[str, str] = {}
    with dist.joined(4.0 if scenario in FAULTS else 60.0) as ranks:
        for name, check in checks.items():
            began = time.monotonic()
            try:
                check(ranks)
                found[name] = ""
            except Exception:  # noqa: BLE001  reported by the test
                found[name] = traceback.format_exc()
            out.write_text(json.dumps(found))
            print(f"rank {rank} {name} {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def start_of(gpus: bool) -> str:
    """How multiprocessing starts a rank."""
    return "spawn" if gpus else "fork"


def outcomes(
    folder: Path,
    scenarios: Sequence[str],
    gpus: bool,
    start: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcomes:
    """Run the scenarios in processes of their own, over NCCL or over gloo on the CPU.

    start: how multiprocessing starts a rank, by default as `start_of` has it. environment: more of it.
    """
    own = {**os.environ, **fixed_order.ENVIRONMENT, "OMP_NUM_THREADS": "1", **(environment or {})}
    if not gpus:
        own["CUDA_VISIBLE_DEVICES"] = ""
    more = [str(folder / "out.json"), start or start_of(gpus), *scenarios]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sharded_run", *more],
        cwd=ROOT,
        env=own,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "out.json").read_text())
    return {scenario: [Told(**rank) for rank in ranks] for scenario, ranks in found.items()}


def main(out: Path, start: str, scenarios: Sequence[str]) -> None:
    """Run the scenarios one after the other and write their Outcomes to `out`."""
    results = {}
    for scenario in scenarios:
        with tempfile.TemporaryDirectory() as folder:
            results[scenario] = [asdict(told) for told in run(scenario, start, Path(folder))]
    out.write_text(json.dumps(results))


def run(scenario: str, start: str, folder: Path) -> list[Told]:
    """Start both ranks of a scenario and see to it that none is left."""
    context: Any = multiprocessing.get_context(start)
    port = free_port()
    ranks: list[BaseProcess] = []
    for rank in range(2):
        arguments = (rank, port, scenario, folder / f"{rank}.json")
        ranks.append(context.Process(target=run_rank, args=arguments, name=f"rank {rank}"))
        with stderr_into(folder / f"{rank}.log"):
            ranks[-1].start()
    deadline = time.monotonic() + LONGEST_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return [told(status, folder / f"{rank}.json", folder / f"{rank}.log") for rank, status in enumerate(statuses)]


def told(status: int | None, found: Path, log: Path) -> Told:
    """What a rank left whose process ended with `status`, as multiprocessing has it; None: it had to be ended."""
    checks = json.loads(found.read_text()) if found.exists() else {}
    if status == 0:
        return Told(checks, "")
    if status is None:
        how = f"still ran after {LONGEST_S:g} s"
    else:
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return Told(checks, f"{how}; it printed:\n{log.read_text(errors='replace')[-PRINTED:]}")


@contextmanager
def stderr_into(path: Path) -> Iterator[None]:
    """A process that is started meanwhile prints its errors into `path`, native ones too."""
    kept = os.dup(2)
    try:
        with path.open("wb") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
