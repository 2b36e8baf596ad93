"""A hang of real ranks, from the planted fault to the verdict, and its evidence frozen as a case of the corpus.

    python -m tests.gpu.hang_run FOLDER [--cpu] [--ranks 2] [CASE ...]

A GPU for each: the trainer under FSDP2 over NCCL, the watcher beside it. On the CPU the same with gloo, a tiny model.
Writes FOLDER/<case>/ as `tests.hangs` has it, FOLDER/<case>.json with times and verdict, and what the ranks printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from configs import compose, runfolder
from configs.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    ModelConfig,
    PackConfig,
    SlurmConfig,
    TrainConfig,
    VerifyConfig,
    WatchConfig,
)
from prefix_train import heartbeat
from preflight.baseline import answer_path
from preflight.collect import node_name
from preflight.device import check_device
from preflight.setting import Setting
from preflight.states import NodeReport
from slurm import evidence, job, verdict
from slurm.evidence import Alarm
from slurm.verdict import Verdict
from tests.gpu.hang_rank import SLEEP
from tests.hangs import cases, make
from tests.hangs.cases import Label
from tests.lives import free_port
from tests.standins import ROOT
from tests.tiny_text import BUILD

WORLD, NODE = 2, "node1"
END_S = 150.0
"""Longest run, from its start to the verdict."""
SENTENCES = 700
"""Of the shared instructions: some ten thousand tokens."""
CALLS = 160
"""Kept of each rank's last collectives: an update has many."""

WIDE: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6,
                        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
DEEP = {**WIDE, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_hidden_layers": 64}  # fmt: skip
"""More launches in a forward pass than the queue to a GPU takes."""


@dataclass(frozen=True)
class Plan:
    """A run: which fault in which rank, of which model, and what has to be said of it."""

    fault: str
    kind: str
    story: str
    rank: int = 1
    build: Mapping[str, Any] = field(default_factory=lambda: WIDE)
    packs: int = 8
    """Of a rank and update."""

    @property
    def phase(self) -> str:
        """In which the fault strikes."""
        return self.fault.removeprefix(SLEEP)


PLANS = {
    "nccl-gather": Plan("sleep in forward", "missing_rank", "a GPU each: a rank does not come to an all_gather"),
    "nccl-deep": Plan("sleep in forward", "missing_rank", "two GPUs, 64 layers: the queue to the waiting GPU is full",
                      rank=0, build=DEEP, packs=2),
    "nccl-backward": Plan("sleep in backward", "missing_rank",
                          "two GPUs, 64 layers: autograd's thread waits, the queue to its GPU is full",
                          build=DEEP, packs=2),
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What came of a run. Seconds are from the moment at which the culprit entered the update that it did not end."""

    said: Verdict
    status: int
    """Of the watcher."""
    noticed_s: float
    judged_s: float
    right: bool
    """Both verdicts, the live one and that on the frozen evidence, name the culprit and the class."""
    case: Path


def options(folder: Path, plan: Plan, cpu: bool, world: int) -> Config:
    """A run of so many ranks, on GPUs with enough to compute that computing shows."""
    _write_rows(folder / "train.jsonl", 4 * world * plan.packs, 1 if cpu else SENTENCES)
    return Config(
        name="hang",
        cluster="local",
        model=ModelConfig(build=BUILD if cpu else dict(plan.build), dtype="float32" if cpu else "bfloat16"),
        data=DataConfig(train=str(folder / "train.jsonl")),
        pack=PackConfig(max_positions=192 if cpu else 16384, packs_per_update=plan.packs * world),
        adapter=AdapterConfig(rank=2, dropout=0.0, targets=["q_proj", "down_proj"]),
        train=TrainConfig(updates=400, lr=1e-4, warmup_updates=2, save_every=0, threads=1 if cpu else 8),
        verify=VerifyConfig(examples=0),
        watch=WatchConfig(poll_s=0.5, floor_s=5, first_update_s=120, sample_gap_s=3, load_s=120),
        slurm=SlurmConfig(tasks_per_node=world, gpus_per_node=0 if cpu else world),
    )


def hang(into: Path, name: str, cpu: bool = False, world: int = WORLD) -> Found:
    """Run the plan `name` to its verdict and freeze its evidence into `into`/<name>. TimeoutError without a verdict."""
    plan = PLANS[name]
    work = Path(tempfile.mkdtemp(prefix="hang-"))
    run = work / "run"
    try:
        config = options(work, plan, cpu, world)
        (run / runfolder.LOGS).mkdir(parents=True)
        runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
        runfolder.write_text(run / runfolder.ATTEMPT, "0\n")
        _read_at_rest(run, config)
        with running(run, config, plan) as watcher:
            try:
                status = watcher.wait(END_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"no verdict in {END_S:.0f} s; the ranks printed:\n{logs(run)}") from None
        if not verdict.folders(run):
            raise TimeoutError(f"the watcher ended with {status} and no alarm; the ranks printed:\n{logs(run)}")
        return _frozen(into / name, run, work, plan, world, status)
    finally:
        into.mkdir(parents=True, exist_ok=True)
        (into / f"{name}.log").write_text(logs(run))
        shutil.rmtree(work)


@contextmanager
def running(run: Path, config: Config, plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """The ranks and their watcher, which is yielded; none is left at the end."""
    port, processes = free_port(), list[subprocess.Popen[bytes]]()
    world = config.slurm.tasks_per_node
    for rank in range(world):
        place = job.Place(rank, world, rank, "127.0.0.1", port)
        with (run / runfolder.LOGS / f"rank{rank}.log").open("wb") as log:
            fault = plan.fault if rank == plan.rank else "none"
            own = _environment() | job.rank_environment(config, place, os.environ)
            command = [sys.executable, "-u", "-m", "tests.gpu.hang_rank", str(run), fault]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log))
    command = [sys.executable, "-m", "slurm.watch", str(run)]
    processes.append(subprocess.Popen(command, cwd=ROOT, env=_environment()))
    try:
        yield processes[-1]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def logs(run: Path) -> str:
    """The end of each rank's log."""
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted((run / runfolder.LOGS).glob("*.log")))


def _environment() -> dict[str, str]:
    """NVLink multicast stays off: a rank that is killed in it can take the host's GPUs along."""
    return {**os.environ, "PREFIX_TRAIN_ATTEMPT": "0", "NCCL_NVLS_ENABLE": "0"}


def _read_at_rest(run: Path, config: Config) -> None:
    """Preflight's own reading of the GPUs before anything runs on them."""
    report = NodeReport(node_name(), tuple(check_device(Setting(config, run))))
    runfolder.write_json(answer_path(run, 0, report.node), report.to_json())


def _frozen(folder: Path, run: Path, work: Path, plan: Plan, world: int, status: int) -> Found:
    hung = verdict.folders(run)[0]
    alarm, said, nodes = evidence.read_alarm(hung), verdict.load(hung), evidence.read(hung)
    if alarm is None or said is None or not nodes:
        raise TimeoutError(f"the watcher ended with {status} and no verdict; the ranks printed:\n{logs(run)}")
    culprit = next(beat for beat in heartbeat.read(run) if beat.rank == plan.rank)
    judged = (hung / verdict.JSON).stat().st_mtime
    label = Label(plan.story, plan.kind, (plan.rank,), world, (NODE,))
    names = {
        str(run): "/runs/demo",
        str(work): "/data",
        tempfile.gettempdir(): "/scratch",
        sys.prefix: "/usr",
        sys.base_prefix: "/usr",
        str(Path(torch.__file__).parents[1]): "/usr/lib/python3.12/site-packages",
        str(ROOT): "/runs/demo/code",
    }
    make.freeze(folder, label, make.split(nodes[0], (NODE,)), _at_home(alarm), names, CALLS)
    again = cases.read(folder).judge()
    right = all((one.kind, one.ranks) == (plan.kind, (plan.rank,)) for one in (said, again))
    noticed_s, judged_s = (round(then - culprit.since, 1) for then in (alarm.time, judged))
    found = Found(said, status, noticed_s, judged_s, right, folder)
    runfolder.write_json(folder.with_suffix(".json"), {**asdict(found), "case": folder.name, "frozen": asdict(again)})
    shutil.copytree(hung, folder.with_suffix(".raw"), dirs_exist_ok=True)
    return found


def _at_home(alarm: Alarm) -> Alarm:
    return replace(alarm, host=NODE)


def _write_rows(path: Path, count: int, words: int) -> None:
    instructions = " ".join(["Add the numbers. Answer in one short sentence."] * words)
    rows = [
        [
            {"role": "system", "content": instructions},
            {"role": "user", "content": f"How much is {index} and {3 * index}?"},
            {"role": "assistant", "content": f"It is {4 * index}."},
        ]
        for index in range(count)
    ]
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in rows) + "\n")


def main() -> int:
    """Run the cases that are named, or all; 0 where each verdict names the culprit and its class, also when frozen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(PLANS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--ranks", type=int, default=WORLD)
    given = parser.parse_intermixed_args()
    good = True
    for name in given.cases or PLANS:
        began = time.monotonic()
        try:
            found = hang(given.folder, name, given.cpu, given.ranks)
        except TimeoutError as error:
            print(f"BAD {name} ({time.monotonic() - began:.0f} s): {error}", flush=True)
            good = False
            continue
        good &= found.right
        print(f"{'ok ' if found.right else 'BAD'} {name} ({time.monotonic() - began:.0f} s): noticed after "
              f"{found.noticed_s} s, judged after {found.judged_s} s, status {found.status}")  # fmt: skip
        print(found.said.text(), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
