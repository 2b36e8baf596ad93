"""What a job does before the ranks start, as data: local runs and the sbatch script are made from the same list.

The nodes are judged twice. A node that is unfit by itself ends the job before the ranks are brought together: that
takes seconds, and the report blames nobody for having waited for it. Only nodes that are fit one by one take the
collective test, and the second judgement is over everything.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.schema import Config

GATE = "gate"
"""The act whose failure means that the nodes are not fit to train."""


@dataclass(frozen=True)
class Act:
    """One command of a job."""

    name: str
    argv: tuple[str, ...]
    where: Literal["once", "node", "rank"] = "once"
    """`once`: on the job's first node. `node`: on every node. `rank`: as every rank, with what a rank has."""
    decides: bool = True
    """Whether a failure ends the job; a later act judges those that do not decide."""
    seconds: float = 0.0
    """How long it may take on a node or as a rank, once it has started."""


def command(*arguments: str) -> tuple[str, ...]:
    """A module of the frozen code as a command of the submitting interpreter."""
    return (sys.executable, "-m", *arguments)


def before_training(config: Config, run: Path) -> list[Act]:
    """Everything up to the ranks, in order."""
    acts = []
    train = Path(config.data.train)
    if config.data.prepare != "none" and not train.exists():
        acts.append(Act("data", command("prefix_train.cli", "data", config.data.prepare, str(train.parent))))
    acts.append(Act("plan", command("prefix_train.cli", "plan", str(run))))
    return [*acts, *_preflight(config, run)] if config.preflight.enabled else acts


def _preflight(config: Config, run: Path) -> list[Act]:
    options, folder = config.preflight, str(run)
    proof = options.prove_deadline_s if options.prove_pins and config.slurm.gpus_per_node else 0.0
    seconds = options.deadline_s + proof
    nodes = Act("preflight", command("preflight", "run", folder), "node", decides=False, seconds=seconds)
    judge = command("preflight", "judge", folder)
    if not options.collectives or config.ranks == 1:
        return [nodes, Act(GATE, judge)]
    spawn = () if config.cluster == "slurm" else ("--spawn", str(config.ranks))
    meet = command("preflight", "collectives", folder, *spawn)
    ranks = Act("collectives", meet, "rank", decides=False, seconds=options.collective_deadline_s)
    return [nodes, Act(GATE, (*judge, "--quiet")), ranks, Act(GATE, (*judge, "--ranks", str(config.ranks)))]
