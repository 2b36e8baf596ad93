"""A clone of this source whose trainer and preflight are stand-ins: what surrounds the training is real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

REAL = ("__init__", "budget", "heartbeat", "lengths", "packing", "plan", "plan_summary", "ring", "tree")
"""Modules of the trainer that the commands around it use."""

TRAIN = '''
"""Does what model.build.do says, and leaves what it saw in seen/rank<k>.json."""
import ctypes, json, os, signal, sys, time
from pathlib import Path

from configs import compose, runfolder
from configs.errors import UserError
from prefix_train import heartbeat

VERSION = "original"


def main(run):
    config = compose.from_run(run)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = {"train": __file__, "configs": compose.__file__, "version": VERSION, "environment": dict(os.environ),
            "slurm": sys.modules["slurm"].__file__, "pid": os.getpid(), "path": sys.path}
    runfolder.write_json(run / "seen" / f"rank{rank}.json", seen)
    beat = heartbeat.Heartbeat(run, rank, world)
    stop = []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(1))
    print(f"rank {rank} of {world} says hello", flush=True)
    for update in range(1, int(config.train.updates) + 1):
        beat.phase("forward", update, 0)
        act(config.model.build.get("do", "train"), rank, update)
        beat.phase("optimizer", update)
        if stop:
            (run / runfolder.CHECKPOINTS / f"update-{update:06d}").mkdir(parents=True, exist_ok=True)
            return runfolder.STOPPED
    beat.phase("done")
    if rank == 0 and config.model.build.get("do") != "forget":
        runfolder.write_json(run / runfolder.RESULT, {"accuracy": 0.93, "rank": rank}, run=run)
    return 5 if config.model.build.get("do") == "five" and rank == 1 else 0


hoard = []


def act(what, rank, update):
    time.sleep(1 if what in ("slow", "gorge") else 0.02)
    if what == "gorge" and rank == 1:
        hoard.append(bytearray(20 << 20))
    if rank == 1 and update == 2:
        if what == "raise":
            raise RuntimeError("no\\nway")
        if what == "mistake":
            raise UserError("data.train: row 3 is bad")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "abort":
            os.abort()
    if what in ("raise", "kill", "mistake", "abort", "wait") and update == 2:
        ctypes.CDLL(None).sleep(120)
    while what == "deaf" and update == 2:
        time.sleep(1)  # a signal does not end this wait
'''

CLI = """
import json, os, sys, time
from pathlib import Path

arguments = sys.argv[1:]
print("stand-in", *arguments[:2], flush=True)
if arguments[0] == "data":
    folder = Path(arguments[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("{}")
if arguments[0] == "plan":
    run = Path(arguments[1])
    gate = os.environ.get("STANDIN_GATE")
    (run / "planned").write_text(__file__)
    while gate and not os.path.exists(gate):
        time.sleep(0.05)
    sys.exit(int(os.environ.get("STANDIN_PLAN_STATUS", "0")))
"""

PREFLIGHT = """
import os, sys
from pathlib import Path

act, run = sys.argv[1], Path(sys.argv[2])
status = int(os.environ.get("STANDIN_JUDGE_STATUS", "0"))
folder = run / "preflight" / os.environ["PREFIX_TRAIN_ATTEMPT"]
folder.mkdir(parents=True, exist_ok=True)
print("preflight", act, flush=True)
if act == "run":
    (folder / (os.environ.get("SLURMD_NODENAME", os.uname().nodename) + ".json")).write_text('{"findings": []}')
if act != "judge":
    sys.exit(1)
(folder / "report.txt").write_text("FAIL node7: import.torch: 2.9 instead of 2.13\\n" if status else "PASS\\n")
sys.exit(status)
"""

CONFIG = """
name: demo
cluster: local
model:
  build: {do: train}
data:
  train: data/train.jsonl
  prepare: digits
pack:
  packs_per_update: 2
train:
  updates: 3
watch:
  poll_s: 0.1
  floor_s: 1
  sample_gap_s: 0.3
"""


def make_clone(folder: Path) -> Path:
    """A source folder with stand-ins, and standin.yaml in it."""
    for package in ("configs", "slurm"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "prefix_train").mkdir()
    for name in REAL:
        shutil.copy(ROOT / "prefix_train" / f"{name}.py", folder / "prefix_train")
    (folder / "prefix_train" / "train.py").write_text(TRAIN)
    (folder / "prefix_train" / "cli.py").write_text(CLI)
    (folder / "preflight").mkdir()
    (folder / "preflight" / "__init__.py").write_text("")
    shutil.copy(ROOT / "preflight" / "drain.py", folder / "preflight")
    (folder / "preflight" / "__main__.py").write_text(textwrap.dedent(PREFLIGHT))
    (folder / "standin.yaml").write_text(CONFIG)
    return folder


def submit(
    clone: Path, *arguments: str, cwd: Path | None = None, script: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run slurm.submit of `clone` to its end."""
    command, env = submit_command(clone, *arguments, script=script, **environment)
    return subprocess.run(command, cwd=cwd or clone, env=env, capture_output=True, text=True, timeout=120)


def submit_command(
    clone: Path, *arguments: str, script: bool = False, **environment: str
) -> tuple[list[str], dict[str, str]]:
    """The command and its environment: this process's without what pytest and other tests put there."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH", "PREFIX_TRAIN_ATTEMPT")}
    how = [str(clone / "slurm" / "submit.py")] if script else ["-m", "slurm.submit"]
    return [sys.executable, *how, str(clone / "standin.yaml"), *arguments], {**env, **environment}


def run_folder(root: Path) -> Path:
    """The only run folder in `root`."""
    (run,) = [path for path in root.iterdir() if (path / "config.yaml").exists()]
    return run


def seen(run: Path, rank: int) -> dict[str, Any]:
    """What a stand-in rank saw."""
    return json.loads((run / "seen" / f"rank{rank}.json").read_text())


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError
