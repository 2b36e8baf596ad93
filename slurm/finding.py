"""What a rule of a verdict says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slurm.views import Case

Kind = Literal[
    "missing_rank",
    "extra_collective",
    "size_mismatch",
    "kind_mismatch",
    "rank_died",
    "rank_raised",
    "oom_killed",
    "gil_held",
    "io_blocked",
    "data_starved",
    "save_stalled",
    "autotuning",
    "compiling",
    "straggler",
    "network",
    "slow_alive",
    "unknown",
]

Sure = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Finding:
    """What a rule says. clause: begins the sentence. ends: whether the run has to be ended.

    sure: at most so; missing evidence can only lower it. nodes: where the ranks alone do not tell them.
    """

    kind: Kind
    ranks: tuple[int, ...]
    clause: str
    where: str = ""
    ends: bool = True
    sure: Sure = "high"
    advice: str = ""
    nodes: tuple[str, ...] = ()


Rule = Callable[[Case], Finding | None]
