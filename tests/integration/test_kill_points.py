"""`kill -9` at 20 seeded points, many of them inside a save: the run that went on has the unbroken run's losses.

The ranks are forked from one process that has imported everything, so that a life takes a second or two. A kill point
is a number of Python calls into a phase of an update; an unbroken run counts how many there are.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import pytest

from configs import compose, runfolder
from configs.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    PackConfig,
    SlurmConfig,
    TrainConfig,
)
from prefix_train import checkpoint, heartbeat, report, train
from tests import additions, lives
from tests.tiny_text import BUILD

WORLD, UPDATES, SAVE_EVERY = 2, 12, 2
KILLS = 5
"""Kill points of one run; there are four runs, and the second and the fourth kill of each fall into a save."""

COMPUTED = (
    "update",
    "epoch",
    "loss",
    "loss_per_target",
    "loss_per_example",
    "lr",
    "grad_norm",
    "packs",
    "examples",
    "targets",
    "positions",
    "logical_tokens",
    "heldout_loss",
)
"""Figures that must be equal to the bit; times and memory are not among them."""

Place = tuple[int, str]
"""Update and phase."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of `rank` (of all ranks: `all`) at the `call`-th Python call in `phase` of `update`."""

    update: int
    phase: str
    rank: int
    all: bool
    call: int


def live(rank: int, run: Path, kill: Kill | None, calls: Path | None, forgetful: bool) -> None:
    """One rank's life: train, and die at the kill point, or count the calls of every phase into `calls`.

    forgetful: plants a fault, resuming without the optimizer's state.
    """
    if forgetful:
        checkpoint._load_optimizer = lambda *_: None
    output = os.open(run / runfolder.LOGS / f"rank{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    counts: Counter[Place] = Counter()
    watch_calls(rank, run, kill if kill is not None and kill.rank == rank else None, counts, calls is not None)
    status = train.main(run)
    if calls is not None:
        sys.setprofile(None)
        (calls / f"rank{rank}.json").write_text(json.dumps([[*place, count] for place, count in counts.items()]))
    sys.exit(status)


def watch_calls(rank: int, run: Path, kill: Kill | None, counts: Counter[Place], everywhere: bool) -> None:
    """From each change of phase on count Python calls, and die at `kill`; `everywhere`, or only where that is."""
    place: Place = (0, "load")
    original = heartbeat.Heartbeat.phase

    def count(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            counts[place] += 1
            if kill is not None and counts[place] == kill.call:
                sys.setprofile(None)
                die(rank, run, kill.all)

    def phase(beats: heartbeat.Heartbeat, name: str, update: int | None = None, pack: int = -1) -> None:
        nonlocal place
        sys.setprofile(None)
        original(beats, name, update, pack)
        (now,) = (beat for beat in heartbeat.read(run) if beat.rank == rank)
        place = (now.update, name)
        if everywhere or (kill is not None and place == (kill.update, kill.phase)):
            sys.setprofile(count)

    heartbeat.Heartbeat.phase = phase  # type: ignore[method-assign]


def die(rank: int, run: Path, everyone: bool) -> None:
    """SIGKILL for this process, and before that for the other ranks of its life if `everyone` is meant."""
    for beat in heartbeat.read(run) if everyone else []:
        if beat.rank != rank and beat.attempt == runfolder.process_attempt():
            os.kill(beat.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def start(
    run: Path, attempt: int, kill: Kill | None = None, calls: Path | None = None, forgetful: bool = False
) -> list[BaseProcess]:
    """A life of the run, as a launcher starts it."""
    runfolder.write_text(run / runfolder.ATTEMPT, str(attempt))
    environment = {"PREFIX_TRAIN_ATTEMPT": str(attempt)}
    return lives.start(live, WORLD, run, kill, calls, forgetful, environment=environment)


def reap(ranks: list[BaseProcess], patience_s: float = 120.0) -> list[int | None]:
    """Wait for the ranks; where one ends badly the others follow soon, or are killed, as srun does. Exit statuses."""
    deadline = time.monotonic() + patience_s
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode not in (None, 0) for rank in ranks):
            deadline = min(deadline, time.monotonic() + 1.0)
        time.sleep(0.02)
    statuses = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return statuses


def config_for(folder: Path, trainable: Literal["adapter", "all"]) -> Config:
    """Two ranks, adapters with dropout on a tiny hybrid model, evaluation, a checkpoint after every second update."""
    return Config(
        name="kill",
        cluster="local",
        model=ModelConfig(build=BUILD, dtype="float32"),
        data=DataConfig(train=str(folder / "train.jsonl"), heldout=str(folder / "heldout.jsonl")),
        pack=PackConfig(max_positions=256, packs_per_update=WORLD),
        adapter=AdapterConfig(rank=4, dropout=0.1, targets=["q_proj", "in_proj_qkv", "down_proj"]),
        train=TrainConfig(
            trainable=trainable, updates=UPDATES, lr=5e-3, warmup_updates=2, save_every=SAVE_EVERY, schedule="cosine"
        ),
        evaluate=EvaluateConfig(every=3, generate=False),
        slurm=SlurmConfig(nodes=1, tasks_per_node=WORLD),
    )


def new_run(folder: Path, config: Config) -> Path:
    """A run folder as submit makes it."""
    (folder / runfolder.LOGS).mkdir(parents=True)
    runfolder.write_text(folder / runfolder.CONFIG, compose.to_yaml(config))
    return folder


@dataclass(frozen=True)
class Unbroken:
    """A run that nobody disturbed: its metrics, its result, and how many calls each phase had on each rank."""

    config: Config
    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    calls: list[dict[Place, int]]


@pytest.fixture(scope="module", params=["adapter", "all"])
def unbroken(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Unbroken:
    folder = tmp_path_factory.mktemp("unbroken")
    additions.write(folder / "train.jsonl", 24)
    additions.write(folder / "heldout.jsonl", 6)
    config = config_for(folder, request.param)
    run = new_run(folder / "run", config)
    assert reap(start(run, 0, calls=folder)) == [0, 0], (run / "logs" / "rank0.txt").read_text()
    calls = []
    for rank in range(WORLD):
        entries = json.loads((folder / f"rank{rank}.json").read_text())
        calls.append({(update, phase): count for update, phase, count in entries})
    return Unbroken(config, report.read_metrics(run), runfolder.read_json(run / runfolder.RESULT), calls)


def computed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be equal to the bit: everything but times and memory."""
    return [{name: line[name] for name in COMPUTED if name in line} for line in lines]


def draw(choose: random.Random, calls: list[dict[Place, int]], saved: int, inside_save: bool) -> Kill:
    """A kill point after the checkpoint of update `saved`, and not after the next one."""
    rank, everyone = choose.randrange(WORLD), choose.random() < 0.5
    phases = ["save"] if inside_save else ["forward", "backward", "reduce", "optimizer", "evaluate"]
    phase = choose.choice(phases)
    within = range(saved + 1, saved + SAVE_EVERY + 1)
    places = sorted(place for place in calls[rank] if place[0] in within and place[1] == phase)
    if not places:
        return draw(choose, calls, saved, inside_save)
    place = choose.choice(places)
    return Kill(*place, rank, everyone, choose.randrange(1, int(0.9 * calls[rank][place])))


def saved_updates(run: Path) -> int:
    """Updates in the newest complete checkpoint, which must be undamaged; 0 without one."""
    folder = checkpoint.latest(run)
    return 0 if folder is None else checkpoint.read_state(folder)["cursor"]["update"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_anywhere_a_run_goes_on_to_the_same_losses(tmp_path: Path, unbroken: Unbroken, seed: int) -> None:
    run = new_run(tmp_path / "run", unbroken.config)
    choose = random.Random(seed)
    saved = 0
    for life in range(KILLS):
        kill = draw(choose, unbroken.calls, saved, inside_save=life % 2 == 1)
        statuses = reap(start(run, life, kill))
        told = f"{kill} gave {statuses}:\n{(run / 'logs' / f'rank{kill.rank}.txt').read_text()[-2000:]}"
        assert statuses[kill.rank] == -signal.SIGKILL, told
        lines = report.read_metrics(run)
        assert computed(lines) == computed(unbroken.metrics[: len(lines)]), told
        assert saved <= saved_updates(run) <= saved + SAVE_EVERY, told
        saved = saved_updates(run)
    assert reap(start(run, KILLS)) == [0, 0], (run / "logs" / "rank0.txt").read_text()[-3000:]
    assert computed(report.read_metrics(run)) == computed(unbroken.metrics)
    result = runfolder.read_json(run / runfolder.RESULT)
    for name in ("hash_before", "hash_after", "heldout_loss", "positions", "logical_tokens"):
        assert result[name] == unbroken.result[name], name
    assert [path.name for path in checkpoint.complete(run)] == ["update-000010", "update-000012"]
    assert len(list((run / "checkpoints").iterdir())) == 2


@pytest.mark.slow
def test_kill_points_would_show_a_forgotten_optimizer(tmp_path: Path, unbroken: Unbroken) -> None:
    run = new_run(tmp_path / "run", unbroken.config)
    update, phase = saved = (SAVE_EVERY + 1, "backward")
    kill = Kill(update, phase, 0, True, unbroken.calls[0][saved] // 2)
    assert reap(start(run, 0, kill)) == [-signal.SIGKILL] * WORLD
    reap(start(run, 1, forgetful=True))
    lines = computed(report.read_metrics(run))
    wanted = computed(unbroken.metrics)
    assert lines[:update] == wanted[:update], "the weights themselves were loaded"
    assert lines[update:] != wanted[update:]
