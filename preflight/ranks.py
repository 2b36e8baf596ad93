"""Start one rank's collective test with a deadline, leave its answer in the run folder, read all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from configs import runfolder
from configs.errors import UserError
from preflight.collect import node_name
from preflight.environment import without_secrets
from preflight.pairs import RankReport
from preflight.programs import ask

FOLDER = "ranks"


def place_of(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks and rank within the node: torch's variables, or Slurm's."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if all(name in environment for name in names):
            rank, world, local = (int(environment[name]) for name in names)
            return rank, world, local
    raise UserError("which rank is this? start it with srun, set RANK, WORLD_SIZE and LOCAL_RANK, or give --spawn N")


def test_rank(folder: Path, run: Path, seconds: float, gpus: int) -> RankReport:
    """Run this rank's test and leave its answer in `folder`, the attempt's preflight folder.

    gpus: of this node that the run uses; 0: its ranks compute on the CPU, whatever the node has.
    """
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rank, world, local_rank = place_of(os.environ)
    place = {"rank": rank, "world": world, "local_rank": local_rank, "node": node_name(), "seconds": seconds}
    told = json.dumps({**place, "folder": str(folder / FOLDER)})
    answer = ask([sys.executable, "-m", "preflight.collectives", told], seconds)
    error = "" if answer.status == 0 else answer.last_error_line if answer.status else "did not end in time"
    report = RankReport(rank, node_name(), tuple(answer.documents), answer.status, error)
    document = without_secrets(asdict(report), os.environ)
    runfolder.write_json(folder / FOLDER / f"rank{rank}.json", document, run=run)
    return report


def spawn(run: Path, ranks: int) -> None:
    """Start the tests of `ranks` ranks on this machine and wait for all."""
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        argv = [sys.executable, "-m", "preflight", "collectives", str(run)]
        started.append(subprocess.Popen(argv, env=os.environ | own, stdin=subprocess.DEVNULL))
    for program in started:
        program.wait()


def forget(folder: Path) -> None:
    """Remove the answers of an earlier test of the same attempt."""
    for path in (folder / FOLDER).glob("*.json"):
        path.unlink()


def read(folder: Path) -> list[RankReport]:
    """All ranks' answers. Raises Damaged where one is none."""
    return [_load(path) for path in sorted((folder / FOLDER).glob("rank*.json"))]


def _load(path: Path) -> RankReport:
    document = runfolder.read_json(path)
    try:
        return RankReport(**{**document, "steps": tuple({**step} for step in document["steps"])})
    except (KeyError, TypeError) as error:
        raise runfolder.Damaged(f"{path} is damaged: it is not a rank's answer ({error!r})") from error
