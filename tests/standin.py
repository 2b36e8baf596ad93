"""Planting faults in the programs that preflight starts: a `sitecustomize` on their path, a /proc, an nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(folder: Path, code: str = "", **variables: str) -> dict[str, str]:
    """An environment in which every Python program first runs `code`, which lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys\nIN = ' '.join(sys.orig_argv)\n{code}\n")
    path = os.pathsep.join((str(folder), str(ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def program(folder: Path, name: str, script: str) -> str:
    """A shell script `name` in `folder`, and a PATH that finds it first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return os.pathsep.join((str(folder), "/usr/bin", "/bin"))


IN_COLLECTIVES = "if 'preflight.collectives' in IN:\n    import os, time\n    import preflight.collectives as c\n"

SLOW_NODE = IN_COLLECTIVES + (
    "    fast = c.transfer\n"
    "    def slow(group, data):\n"
    "        time.sleep(0.5)\n"
    "        fast(group, data)\n"
    "    c.transfer = slow\n"
)
DEAF_IN_PAIRS = IN_COLLECTIVES + (
    "    def deaf(*_):\n        raise RuntimeError('connection reset by peer')\n    c.bandwidth = deaf\n"
)
STUCK = IN_COLLECTIVES + "    c.values = lambda *_: time.sleep(600)\n"
WRONG_VALUES = IN_COLLECTIVES + (
    "    right = c.part\n"
    "    me = int(os.environ['RANK'])\n"
    "    def wrong(rank, device):\n"
    "        return right(rank, device) + (rank == me)\n"
    "    c.part = wrong\n"
)
KILLED = IN_COLLECTIVES + "    c.values = lambda *_: os.kill(os.getpid(), 9)\n"
LATE_CLOCK = IN_COLLECTIVES + (
    "    real = time.time\n    time.time = lambda: real() - (3600 if sys._getframe(1).f_code.co_name == 'run' else 0)\n"
)
