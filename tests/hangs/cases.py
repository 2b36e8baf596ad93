"""The cases of the corpus: which fault in which rank of which run, and what a verdict has to say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slurm import evidence, verdict
from slurm.evidence import Alarm, Node
from slurm.finding import Rule
from slurm.rules import RULES
from slurm.verdict import Verdict

HERE = Path(__file__).parent
CORPUS, INDEPENDENT = HERE / "corpus", HERE / "independent"


@dataclass(frozen=True)
class Label:
    """What is true of a case: label.json. README.md says what each field means."""

    story: str
    kind: str
    ranks: tuple[int, ...]
    world: int
    hosts: tuple[str, ...]
    healthy: bool = False
    stays: bool = False
    composed: bool = False
    also: tuple[str, ...] = ()
    noticed: bool = True


@dataclass(frozen=True)
class Case:
    """A labelled case as it lies in its folder."""

    name: str
    label: Label
    nodes: tuple[Node, ...]
    alarm: Alarm

    def judge(self, table: tuple[Rule, ...] = RULES) -> Verdict:
        """What the product says of it."""
        return verdict.judge(self.nodes, self.alarm, self.label.world, self.label.hosts, table)


def read(folder: Path) -> Case:
    """The case in `folder`. Raises BadEvidence or msgspec's error where it is not one."""
    label = msgspec.json.decode((folder / "label.json").read_bytes(), type=Label, strict=True)
    alarm = evidence.read_alarm(folder)
    assert alarm is not None, f"{folder} has no {evidence.ALARM}"
    return Case(folder.name, label, evidence.read(folder), alarm)


def read_all(corpus: Path) -> list[Case]:
    """All cases in `corpus`, by name."""
    return [read(path.parent) for path in sorted(corpus.glob("*/label.json"))]


@dataclass(frozen=True)
class Plan:
    """How a case is made. faults: by rank. look: when evidence is taken.

    `alarm`: when a rank is past its deadline, or has ended badly. `phase NAME`: when some rank has been
    in that phase for a second, past its deadline or not. `run`: after ten updates; `slow`: after five, as if
    the last one were late.
    """

    name: str
    story: str
    kind: str
    faults: dict[int, str]
    world: int = 2
    ranks: tuple[int, ...] | None = None
    look: str = "alarm"
    nodes: int = 1
    healthy: bool = False
    stays: bool = False
    """Not healthy, and the run may go on all the same."""
    also: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """`save_every`, `evaluate_every`, and fields of WatchConfig."""

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that a verdict has to name."""
        return tuple(self.faults) if self.ranks is None else self.ranks


def _hang(name: str, kind: str, faults: dict[int, str], world: int, story: str, **more: Any) -> Plan:
    return Plan(name, story, kind, faults, world, **more)


def _healthy(name: str, faults: dict[int, str], world: int, story: str, look: str, **more: Any) -> Plan:
    return Plan(name, story, "slow_alive", faults, world, (), look, healthy=True, **more)


ON_GPUS: tuple[str, ...] = ("nccl-deep", "nccl-gather")
"""Cases that tests.gpu.hang_run has made on two GPUs, over NCCL."""

SAVES = {"save_every": 6, "save_s": 3.0}
EVALUATES = {"evaluate_every": 6, "evaluate_s": 3.0}

PLANS: tuple[Plan, ...] = (
    _hang("missing-sleep-forward", "missing_rank", {1: "sleep in forward"}, 2, "waits before a forward pass"),
    _hang("missing-sleep-backward", "missing_rank", {0: "sleep in backward"}, 2, "waits in a backward pass"),
    _hang("missing-sleep-reduce", "missing_rank", {2: "sleep in reduce"}, 4, "waits before the sum of norms"),
    _hang("missing-sleep-optimizer", "missing_rank", {3: "sleep in optimizer"}, 4, "waits in the optimizer", nodes=2),
    _hang("missing-of-eight", "missing_rank", {5: "sleep in backward"}, 8, "one of eight, on the second node", nodes=2),
    _hang("missing-spins", "missing_rank", {1: "spin"}, 3, "computes without end"),
    _hang("missing-stopped", "missing_rank", {1: "stopped"}, 2, "SIGSTOP"),
    _hang("missing-stopped-first", "missing_rank", {0: "stopped"}, 4, "SIGSTOP of rank 0", nodes=2),
    _hang("missing-stopped-all", "missing_rank", {0: "stopped", 1: "stopped"}, 2, "SIGSTOP of every rank"),
    _hang("missing-pack", "missing_rank", {1: "one pack less"}, 3, "leaves the loop over packs one pack early"),
    _hang("missing-pack-of-two", "missing_rank", {0: "one pack less"}, 2, "the same with two ranks: no majority"),
    _hang("missing-pack-of-eight", "missing_rank", {6: "one pack less"}, 8, "the same with eight ranks", nodes=2),
    _hang("missing-agreement", "missing_rank", {2: "skip agreement"}, 3, "does not take part in one agreement"),
    _hang("missing-norms", "missing_rank", {1: "skip norms"}, 4, "does not add up its norms"),
    _hang("missing-left", "missing_rank", {1: "leave"}, 3, "ends well before the others"),
    _hang("missing-evaluation", "missing_rank", {1: "sleep in evaluation"}, 3, "does not come out of an evaluation",
          options=EVALUATES),
    _hang("extra-sum", "extra_collective", {1: "extra sum"}, 3, "adds up a figure of its own for a log"),
    _hang("extra-sum-of-two", "extra_collective", {0: "extra sum"}, 2, "the same with two ranks: no majority",
          also=("size_mismatch",)),
    _hang("extra-barrier", "extra_collective", {0: "extra barrier"}, 3, "a barrier on rank 0 alone"),
    _hang("extra-gather", "extra_collective", {2: "extra gather"}, 4, "gathers between forward and backward"),
    _hang("extra-pack", "extra_collective", {3: "one pack more"}, 4, "runs one pack more than the others", nodes=2),
    _hang("extra-evaluation", "extra_collective", {1: "evaluate alone"}, 3, "begins an evaluation alone"),
    _hang("extra-save", "extra_collective", {2: "save alone"}, 4, "begins a checkpoint alone"),
    _hang("size-sum", "size_mismatch", {1: "other size"}, 3, "adds up one value more than the others"),
    _hang("size-sum-first", "size_mismatch", {0: "other size"}, 4, "the same on rank 0 of four"),
    _hang("size-dtype", "size_mismatch", {2: "other dtype"}, 3, "float32 where the others have float64"),
    _hang("kind-broadcast", "kind_mismatch", {1: "other kind"}, 3, "a broadcast where the others add up"),
    _hang("kind-gather", "kind_mismatch", {2: "gather instead"}, 4, "a gather where the others look for the largest"),
    _hang("died-killed", "rank_died", {1: "killed"}, 2, "SIGKILL, and nothing says that memory ran out"),
    _hang("died-segfault", "rank_died", {0: "segfault"}, 3, "SIGSEGV"),
    _hang("died-abort", "rank_died", {1: "abort"}, 2, "SIGABRT with equal collectives"),
    _hang("died-exit", "rank_died", {2: "exit 7"}, 4, "exit status 7 without an exception"),
    _hang("raised-data", "rank_raised", {1: "raise in data"}, 3, "ValueError while batches are made"),
    _hang("raised-backward", "rank_raised", {0: "raise in backward"}, 2, "RuntimeError in backward"),
    _hang("raised-waits", "rank_raised", {1: "raise and wait"}, 3, "raises, and its teardown waits for the others"),
    _hang("raised-save", "rank_raised", {0: "raise in save"}, 2, "raises while it writes a checkpoint",
          options=SAVES),
    _hang("lock-main", "gil_held", {1: "lock"}, 2, "the main thread waits in C with the interpreter lock"),
    _hang("lock-thread", "gil_held", {0: "lock in a thread"}, 3, "another thread does"),
    _hang("lock-thread-of-four", "gil_held", {3: "lock in a thread"}, 4, "the same on the second node", nodes=2),
    _hang("io-forward", "io_blocked", {1: "kernel in forward"}, 2, "state D in the forward pass"),
    _hang("io-reduce", "io_blocked", {2: "kernel in reduce"}, 4, "state D before the sum of norms"),
    _hang("data-sleeps", "data_starved", {1: "data sleeps"}, 2, "batches do not come"),
    _hang("data-dead-file", "data_starved", {2: "data from a dead file"}, 4, "reads a file that never answers",
          also=("io_blocked",)),
    _hang("data-everywhere", "data_starved", {0: "data sleeps", 1: "data sleeps"}, 2, "no rank gets batches"),
    _hang("save-sleeps", "save_stalled", {0: "save sleeps"}, 2, "a checkpoint is not written", options=SAVES),
    _hang("save-dead-file", "save_stalled", {0: "save to a dead file"}, 4, "writes to a file that never answers",
          options=SAVES, also=("io_blocked",)),
    _hang("save-lock", "gil_held", {0: "lock in save"}, 3, "holds the lock while it saves", options=SAVES,
          also=("save_stalled",)),
    _healthy("ok-first-update", {1: "long first update"}, 2, "a first update of twelve seconds", "phase first_update"),
    _healthy("ok-save", {0: "long save"}, 2, "a checkpoint of sixteen seconds", "phase save",
             options={"save_every": 6}),
    _healthy("ok-evaluation", {1: "long evaluation"}, 3, "an evaluation of ten seconds", "phase evaluate",
             options={"evaluate_every": 6}),
    _healthy("ok-search", {1: "search"}, 2, "kernels are searched in the first update", "phase first_update"),
    _healthy("ok-search-late", {0: "search late"}, 3, "kernels are searched in a later update, past its deadline",
             "alarm", also=("autotuning",)),
    _healthy("ok-search-everywhere", {0: "search late", 1: "search late", 2: "search late"}, 3,
             "the same on every rank: nobody waits", "alarm", also=("autotuning",)),
    _healthy("ok-compile", {1: "compile"}, 2, "torch.compile in the first update", "phase first_update",
             also=("compiling",)),
    _healthy("ok-compile-late", {1: "compile late"}, 2, "torch.compile in a later update, past its deadline", "alarm",
             also=("compiling",)),
    _healthy("ok-data-drips", {1: "data drips"}, 2, "data comes slowly and goes on, past its deadline", "alarm",
             also=("data_starved",)),
    _healthy("ok-data-drips-of-four", {3: "data drips"}, 4, "the same on one of four", "alarm", also=("data_starved",)),
    _healthy("ok-stopped-for-a-moment", {1: "stopped for a moment"}, 2, "SIGSTOP for four seconds", "alarm"),
    _healthy("ok-runs", {}, 2, "trains", "run"),
    _healthy("ok-runs-of-four", {}, 4, "trains on four ranks", "run", nodes=2),
    _healthy("ok-runs-of-eight", {}, 8, "trains on eight ranks", "run", nodes=2),
    _healthy("ok-uneven", {1: "slow"}, 3, "one rank takes a little longer in every pack", "run"),
    _hang("straggler", "straggler", {2: "slow forward"}, 4, "one rank takes three seconds more per update", look="slow",
          stays=True),
    _hang("straggler-first", "straggler", {0: "slow forward"}, 3, "the same on rank 0 of three", look="slow",
          stays=True),
)  # fmt: skip
