"""`python -m slurm.rank RUN`: one rank. Lets the watcher look into it, trains, and writes how it ended."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path

from configs import runfolder
from configs.errors import UserError
from prefix_train import heartbeat

_PR_SET_PDEATHSIG, _PR_SET_PTRACER = 1, 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def stack_file(run: Path, rank: int) -> Path:
    """Where a rank's own handler of SIGUSR1 writes its Python stacks, for nodes where nobody may trace a process."""
    return run / runfolder.LOGS / f"rank{rank}.stacks.txt"


def allow_watching(run: Path, rank: int) -> None:
    """Let any process of this user trace this one, and answer SIGUSR1 with all Python stacks.

    Many nodes run with Yama's ptrace scope 1, where a watcher that is no ancestor may not attach unasked.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # without Yama: EINVAL, and no need
    path = stack_file(run, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=path.open("w"), all_threads=True)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is killed, so that no rank outlives its job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def run_here(run: Path) -> int:
    """Train as the rank that the environment names; returns the exit status. The end is on record also if it raises."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    runfolder.check_attempt(run)
    allow_watching(run, rank)
    heartbeat.Heartbeat(run, rank, world)
    try:
        from prefix_train import train

        status: int = train.main(run)
    except BaseException as error:
        heartbeat.ended(run, rank, world, error=error)
        raise
    heartbeat.ended(run, rank, world, status=status)
    return status


def main(run: Path) -> int:
    """`run_here`, with a user's mistake as one line and status 2."""
    end_with_parent()
    try:
        return run_here(run)
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        return heartbeat.exit_status(mistake)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
