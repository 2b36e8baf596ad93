"""Run folders as runs leave them, made in milliseconds."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import compose, runfolder
from configs.schema import Config, DataConfig, ModelConfig, PackConfig, SlurmConfig, TrainConfig
from preflight import judge, report, states
from slurm import verdict
from slurm.evidence import ALARM, Alarm
from slurm.policy import Cause, Life

BEGAN = 1_796_000_000.0
"""When the first life of a made run began, seconds since 1970."""
GIB = 1 << 30

PLAN: dict[str, Any] = {
    "mode": "shared",
    "seed": 0,
    "epoch": 0,
    "ranks": 2,
    "digest": "ab" * 32,
    "max_positions": 2720,
    "updates": 14,
    "packs": 28,
    "empty_packs": 0,
    "packs_per_update": {"least": 2, "mean": 2.0, "most": 2},
    "examples": 1499,
    "examples_per_update": {"least": 49, "mean": 107.07, "most": 144},
    "segments": 1527,
    "depth": 2,
    "positions": 72805,
    "logical_tokens": 1919744,
    "ratio": 26.368,
    "visible_pairs": {"packed": 70905997, "standalone": 1286726729, "ratio": 18.147},
    "fill": 0.956,
    "bound": {"packs": 27, "positions": 71274},
    "waste": {"packs": 0.0, "positions": 0.0215},
    "balance": 0.974,
    "longest": [{"source": "train.jsonl:1", "tokens": 1555}],
    "histogram": {"edges": [1006.0, 1280.5, 1555.0], "examples": [749, 750]},
    "updates_in_run": 40,
    "skipped": [],
}


def begun(run: Path, **train: Any) -> Path:
    """A run folder as submit leaves it, on two nodes of two ranks."""
    config = Config(
        name="demo",
        data=DataConfig(train="t.jsonl"),
        model=ModelConfig(build={"model_type": "x"}),
        pack=PackConfig(packs_per_update=4),
        train=TrainConfig(**{"updates": 40, **train}),
        slurm=SlurmConfig(nodes=2, tasks_per_node=2),
    )
    run.mkdir(parents=True)
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
    os.utime(run / runfolder.CONFIG, (BEGAN - 300, BEGAN - 300))
    return run


def put(path: Path, document: Any, at: float | None = None) -> None:
    """A JSON file; at: when it was written, seconds since 1970."""
    runfolder.write_json(path, document)
    if at is not None:
        os.utime(path, (at, at))


def metrics(run: Path, updates: int, slower: float = 1.0) -> None:
    """metrics.jsonl after so many updates of two seconds, and a held-out loss at the last."""
    lines = []
    for number in range(1, updates + 1):
        seconds = 2.0 * slower
        lines.append(
            {
                "update": number,
                "loss": 8.0 / number,
                "lr": 1e-3,
                "grad_norm": 2.0 / number,
                "packs": 4,
                "examples": 100,
                "targets": 900,
                "positions": 5000,
                "logical_tokens": 125_000,
                "seconds": seconds,
                "positions_per_s": 5000 / seconds,
                "logical_tokens_per_s": 125_000 / seconds,
                "memory_bytes": 3 * GIB if number > 1 else 2 * GIB,
            }
        )
    lines.append({"update": updates, "heldout_loss": 0.25})
    (run / runfolder.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def result(updates: int, **changes: Any) -> dict[str, Any]:
    """result.json of a run with these `metrics`."""
    sums = {"packs": 4, "examples": 100, "targets": 900, "positions": 5000, "logical_tokens": 125_000}
    return {
        "name": "demo",
        "ranks": 4,
        "updates": updates,
        **{name: value * updates for name, value in sums.items()},
        "tensors": {"trained": 141, "covered": 141, "without_gradient": []},
        "kernels": {"attention": "merged", "standalone_deltanet": "transformers' torch reference"},
        "skipped": [],
        "hash_before": "1" * 64,
        "hash_after": "2" * 64,
        "heldout_examples": 297,
        "heldout_loss": 0.25,
        "accuracy": 0.963,
        "chance": 0.1,
        "fields": {"digit": 0.953},
        "verify": {
            "passed": True,
            "failed": [],
            "examples": 64,
            "tensors": 141,
            "differences": {"mean_loss": 1.5e-8, "example_mean": 7e-8, "example_max": 2e-7, "gradient": 4e-6},
            "bounds": {"mean_loss": 1e-5, "example_mean": 1e-5, "example_max": 1e-4, "gradient": None},
            "worst_gradient": "layers.7.weight",
        },
        **changes,
    }


def preflight(run: Path, life: int, at: float, problem: str = "", wall: float = 0.0) -> None:
    """Preflight's report of one life; problem: what is found on node2. wall: the nodes' clock."""
    findings = (states.Finding("python.version", "pass", "Python 3.11.7"),)
    problems = (judge.Problem("node2", states.Finding("device.ecc", "fail", problem, "drain it"), False),)
    nodes = tuple(states.NodeReport(name, findings, 1.0, wall) for name in ("node1", "node2"))
    found = judge.Verdict(not problem, problems if problem else (), nodes)
    put(run / runfolder.PREFLIGHT / str(life) / "report.json", report.document(found), at)


def life(run: Path, number: int, ended: float, cause: Cause | None, update: int, why: str = "") -> None:
    """lives/<number>.json."""
    excluded = ("node2",) if cause == "hang" else ()
    one = Life(number, "4711", ("node1", "node2"), cause, update, excluded, excluded)
    put(run / runfolder.LIVES / f"{number}.json", {**asdict(one), "why": why}, ended)


def hang(run: Path, number: int, attempt: int, at: float, sentence: str | None) -> None:
    """hangs/<number>; sentence: the verdict's, none where it has not been judged."""
    folder = run / runfolder.HANGS / str(number)
    alarm = Alarm(attempt, "node2", 3, 70.0, 60.0, "rank 3 is late", at, 1)
    put(folder / ALARM, asdict(alarm), at)
    if sentence is not None:
        said = verdict.Verdict(attempt, "missing_rank", True, (3,), sentence, ("node2",), since=at, confidence="high")
        put(folder / verdict.JSON, asdict(said), at)


def complete(run: Path, updates: int = 40, **train: Any) -> Path:
    """A run that has ended well at the first attempt."""
    begun(run, **train)
    put(run / runfolder.PLAN, PLAN)
    metrics(run, updates)
    preflight(run, 0, BEGAN)
    life(run, 0, BEGAN + 900, "complete", updates)
    put(
        run / runfolder.CODE / "COMMIT.json",
        {"commit": "c0ffee" * 6 + "cafe", "dirty": False, "files": "", "diff": None},
    )
    put(run / runfolder.RESULT, result(updates))
    return run
