"""Three real nodes that preflight is asked on, each with a disk that is healthy or has a fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import runfolder
from configs.compose import from_run
from slurm.acts import before_training
from tests import standin
from tests.bench.preflight_node import Node
from tests.bench.preflight_stage import ROOT, make_node
from tests.slurm.lab import Lab

NAMES = ("node1", "node2", "node3")
ODD = "node2"
DISK = Path(f"/var/tmp/preflight-{os.getpid()}")
"""What a node has of its own: every node of the lab has a /var/tmp of its own."""
COLLECTIVE_S, START_S = 24, 15
OPTIONS = {"deadline_s": 90, "collective_deadline_s": COLLECTIVE_S, "min_free_disk_gib": 0.01}
ENTER = """
import os, sys
told, path, *arguments = sys.argv[1:]
own = dict(word.split("=", 1) for word in open(told).read().split("\\0")[:-1])
os.environ.update(own, PYTHONPATH=path, OMP_NUM_THREADS="1")
os.execv(sys.executable, [sys.executable, *arguments])
"""
"""Takes on the node's own variables, then becomes the program."""

Plant = Callable[[Node], object]


@dataclass(frozen=True)
class Nodes:
    """The nodes of one job. run: its folder, which all nodes see. stage: where disks are made."""

    lab: Lab
    run: Path
    stage: Path

    @property
    def answers(self) -> Path:
        return self.run / runfolder.PREFLIGHT / "0"

    def lay(self, name: str, plant: Plant | None = None) -> None:
        """Give the node its disk. GPUs and their packages are stood in for; name, network and limits are real."""
        staged = self.stage / name
        with own_folder(DISK):
            node = make_node(DISK, name)
            shutil.rmtree(node.run)
            node.addresses, node.interfaces, node.infiniband, node.limits = None, None, {}, {}
            if plant:
                plant(node)
            words = [f"{variable}={text}" for variable, text in node.variables().items()]
            standin.environment(node.path, node.inside())
            (DISK / "variables").write_text("".join(f"{word}\0" for word in words))
            shutil.copytree(DISK, staged, symlinks=True)
        self.lab.inside("rm", "-rf", DISK, node=name)
        self.lab.inside("cp", "-a", staged, DISK, node=name)
        shutil.rmtree(staged)

    def ask(self, *names: str, seconds: float | None = None) -> float:
        """Have nodes check themselves, by the job's own act; how long that took."""
        act = next(act for act in before_training(from_run(self.run), self.run) if act.name == "preflight")
        for name in names:
            (self.answers / f"{name}.json").unlink(missing_ok=True)
        return self._srun(names, act.argv[1:], act.seconds + START_S if seconds is None else seconds)

    @contextmanager
    def asked_again(self, name: str, seconds: float | None = None) -> Iterator[float]:
        """Ask the node anew; behind the block its earlier answer is back. Yields how long it took."""
        path = self.answers / f"{name}.json"
        before = path.read_text()
        yield self.ask(name, seconds=seconds)
        path.write_text(before)

    def meet(self) -> float:
        """Have one rank of each node talk to the others; how long that took."""
        shutil.rmtree(self.answers / "ranks", ignore_errors=True)
        return self._srun(NAMES, ("-m", "preflight", "collectives", str(self.run)), COLLECTIVE_S + START_S)

    def judge(self, *options: str) -> dict[str, Any]:
        """The judge's document over the nodes' answers."""
        command = [sys.executable, "-m", "preflight", "judge", str(self.run), "--nodes", ",".join(NAMES), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        document: dict[str, Any] = runfolder.read_json(self.answers / "report.json")
        assert (done.returncode == 0) == document["passed"], done.stderr
        return document

    def _srun(self, names: tuple[str, ...], arguments: tuple[str, ...], seconds: float) -> float:
        count = str(len(names))
        step = ["timeout", "--kill-after=10", f"{seconds:g}", "srun", "-N", count, "-n", count, "-w", ",".join(names)]
        program = [sys.executable, "-c", ENTER, str(DISK / "variables"), f"{DISK}/path{os.pathsep}{ROOT}", *arguments]
        began = time.monotonic()
        subprocess.run([*step, *program], env=self.lab.environment, capture_output=True, check=False, timeout=300)
        return time.monotonic() - began


def make_nodes(lab: Lab, folder: Path) -> Nodes:
    """Healthy nodes of a new job, not yet asked."""
    with own_folder(DISK):
        node = make_node(DISK, ODD, **OPTIONS)
        shutil.move(node.run, folder / "run")
    nodes = Nodes(lab, folder / "run", folder / "stage")
    nodes.stage.mkdir()
    for name in NAMES:
        nodes.lay(name)
    return nodes


@contextmanager
def own_folder(path: Path) -> Iterator[None]:
    """A folder that is here within the block only."""
    path.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(path)
