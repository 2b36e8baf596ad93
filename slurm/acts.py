"""What a job does before the ranks start, as data: local runs and the sbatch script are made from the same list."""

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
    where: Literal["once", "node"] = "once"
    """`once`: on the job's first node. `node`: on every node."""
    decides: bool = True
    """Whether a failure ends the job; a later act judges those that do not decide."""


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
    if config.preflight.enabled:
        acts.append(Act("preflight", command("preflight", "run", str(run)), where="node", decides=False))
        acts.append(Act(GATE, command("preflight", "judge", str(run))))
    return acts
