"""`python -m tests.gpu.hang_rank RUN FAULT`: one rank of the real trainer, FAULT planted into it, `none` for none."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm.rank import main
from tests.hangs import faults

SLEEP = "sleep in "
UPDATE = 12
"""Updates before it: seconds of computing, in which the watcher has read what computing looks like on these GPUs."""


def strike(fault: str, run: Path) -> None:
    """Plant `fault`, one of tests.hangs.faults, into update UPDATE."""
    faults.UPDATE = UPDATE
    if fault.startswith(SLEEP):
        faults.at(fault.removeprefix(SLEEP), faults.sleep, UPDATE)
    elif fault != "none":
        faults.strike(fault, run)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    strike(sys.argv[2], folder)
    sys.exit(main(folder))
