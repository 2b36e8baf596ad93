"""Planting faults in the programs that preflight starts: a `sitecustomize` on their path, a /proc, an nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
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


def package(folder: Path, name: str, version: str, source: str = "") -> None:
    """An importable package that an installer seems to have put into `folder`."""
    distribution = {"fla": "flash_linear_attention"}.get(name, name)
    info = folder / f"{distribution}-{version}.dist-info"
    (folder / name).mkdir(parents=True, exist_ok=True)
    info.mkdir(exist_ok=True)
    (folder / name / "__init__.py").write_text(f"__version__ = {version!r}\n{source}\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n")


def run_ranks(
    run: Path,
    nodes: int,
    faults: dict[int, str],
    absent: tuple[int, ...] = (),
    seconds: float = 60,
    variables: dict[int, dict[str, str]] | None = None,
) -> None:
    """Start one rank per node and wait for all. faults: code that a rank's programs run first."""
    run.mkdir(parents=True, exist_ok=True)
    settings = (ROOT / "configs" / "digits.yaml").read_text()
    settings = settings.replace("preflight:\n", f"preflight:\n  collective_deadline_s: {seconds}\n")
    (run / "config.yaml").write_text(settings)
    started = []
    for rank in set(range(nodes)) - set(absent):
        place = {"RANK": str(rank), "WORLD_SIZE": str(nodes), "LOCAL_RANK": "0", "SLURMD_NODENAME": f"node{rank}"}
        place |= (variables or {}).get(rank, {})
        env = environment(run / f"path{rank}", faults.get(rank, ""), **place)
        argv = [sys.executable, "-m", "preflight", "collectives", str(run)]
        started.append(subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for program in started:
        program.wait(timeout=seconds + 60)
