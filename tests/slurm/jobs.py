"""Submit to the test cluster as a user does, and look at what became of the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs import runfolder
from prefix_train import heartbeat
from slurm import life
from slurm.policy import Life
from tests.slurm.lab import Lab, LabError, wait_for
from tests.standins import ROOT, submit_command

HERE = Path(__file__).parent

QUICK = ("watch.poll_s=0.2", "watch.floor_s=30", "watch.first_update_s=60", "watch.sample_gap_s=0.5", "slurm.mem=2000M")
"""Memory for several jobs on a node; and the nodes share few cores: no rank is called stuck because of that."""
SHARP = ("watch.floor_s=3", "watch.first_update_s=3")
"""Deadlines for ranks that are to be found stuck."""


@dataclass(frozen=True)
class Job:
    """A submitted job: where it runs, its id, its run folder."""

    lab: Lab
    id: str
    run: Path

    @property
    def log(self) -> str:
        """What the batch script and its steps printed."""
        paths = (self.run / runfolder.LOGS).glob("job-*.log")  # none: the job has not begun, or its folder is gone
        return "".join(path.read_text() for path in paths)

    @property
    def last_line(self) -> str:
        return self.log.splitlines()[-1]

    def end(self, state: str, seconds: float = 600) -> None:
        """Wait for the job's end, which is to be in `state`."""
        found = self.lab.wait_end(self.id, seconds)
        assert found == state, f"{found}\n{self.log}"

    @property
    def status(self) -> int:
        return self.lab.exit_status(self.id)

    @property
    def lives(self) -> list[Life]:
        return life.read(self.run)

    def pid(self, rank: int) -> int:
        """Process of a rank by its own word, as its node numbers them: what it forks is called alike for a moment."""
        (beat,) = heartbeat.read(self.run, [rank])
        return beat.pid

    def watcher(self, node: int) -> int:
        """Process of a node's watcher, likewise."""
        pid: int = runfolder.read_json(self.run / runfolder.HEARTBEAT / f"watch{node}.json")["pid"]
        return pid

    def wait_update(self, update: int, attempt: int = 0, seconds: float = 300) -> None:
        """Wait until life `attempt` has come to `update`."""
        self.wait(lambda: life.reached(self.run, attempt) >= update, f"update {update}", seconds)

    def wait_life(self, attempt: int, seconds: float = 300) -> None:
        self.wait(lambda: len(self.lives) > attempt, f"life {attempt}", seconds)

    def wait(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        try:
            wait_for(condition, what, seconds)
        except LabError:
            print(self.log)
            raise


def start(
    lab: Lab, clone: Path, *arguments: str, nodes: int = 2, ranks: int = 1, within: bool = False, **environment: str
) -> Job:
    """Submit the stand-in trainer of `clone` on `nodes` x `ranks`; `within`: from within the lab, with its disks."""
    command, env = submit_command(clone, *_options(arguments, nodes, ranks), **_place(lab), **environment)
    if not within:
        return _submitted(lab, command, clone, env)
    inside = ["nsenter", "-t", str(lab.pid), "--net", "--pid", "--mount", "--", "env", f"--chdir={clone}"]
    job = _submitted(lab, [*inside, *command], clone, env)
    return replace(job, run=lab.within(job.run))


def start_sweep(lab: Lab, clone: Path, sweep: str, *arguments: str) -> list[Job]:
    """Submit a sweep of the stand-in trainer as a job array of one node each."""
    options = _options(arguments, 1, 1)
    command, env = submit_command(clone, *options, "--sweep", sweep, **_place(lab))
    document = _submit(command, clone, env)
    return [Job(lab, job, Path(run)) for job, run in zip(document["jobs"], document["runs"], strict=True)]


def start_real(lab: Lab, folder: Path, *arguments: str, nodes: int = 2, ranks: int = 1, **environment: str) -> Job:
    """Submit the real trainer of this source with a tiny model, in `folder`."""
    config = folder / "tiny.yaml"
    if not config.exists():
        config.write_text((HERE / "tiny.yaml").read_text())
        for name, count in (("train", 48), ("heldout", 6)):
            write_rows(folder / f"{name}.jsonl", count)
    command = [sys.executable, "-m", "slurm.submit", str(config), *_options(arguments, nodes, ranks)]
    own = (f"run_root={folder}/runs", f"data.train={folder}/train.jsonl", f"data.heldout={folder}/heldout.jsonl")
    kept = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PREFIX_TRAIN_ATTEMPT")}
    return _submitted(lab, [*command, *own], ROOT, {**kept, **_place(lab), **environment})


def write_rows(path: Path, count: int) -> None:
    """Sums under one instruction."""
    system = "Add the two numbers that you are given. Answer in one short sentence and give nothing but the sum."
    rows = []
    for index in range(count):
        turns = [("system", system), ("user", f"How much is {index} and {3 * index}?"), ("assistant", f"{4 * index}.")]
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    path.write_text("\n".join(rows) + "\n")


def losses(run: Path) -> dict[int, float]:
    """Loss of every update that the run's metrics hold."""
    lines = [json.loads(line) for line in (run / runfolder.METRICS).read_text().splitlines()]
    return {line["update"]: line["loss"] for line in lines if "loss" in line}


def _options(arguments: Sequence[str], nodes: int, ranks: int) -> list[str]:
    shape = (f"slurm.nodes={nodes}", f"slurm.tasks_per_node={ranks}", f"pack.packs_per_update={nodes * ranks}")
    return ["cluster=slurm", "--json", *QUICK, *shape, *arguments]


def _place(lab: Lab) -> dict[str, str]:
    return {name: lab.environment[name] for name in ("PATH", "SLURM_CONF")}


def _submitted(lab: Lab, command: list[str], folder: Path, env: dict[str, str]) -> Job:
    document = _submit(command, folder, env)
    return Job(lab, document["job"], Path(document["run"]))


def _submit(command: list[str], folder: Path, env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document
