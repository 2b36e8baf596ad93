"""One run as this page tells of it, read from its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import Config
from prefix_train import budget, heartbeat, lengths
from prefix_train.budget import GIB
from prefix_train.heartbeat import Beat, End
from prefix_train.results import evaluations, lives
from prefix_train.results.evaluations import Evaluation
from prefix_train.results.lives import Hang, Span
from prefix_train.results.records import Commit, Ending, Plan, Preflight, Reader, Result

Found = TypeVar("Found")


@dataclass(frozen=True)
class Limit:
    """How much memory a rank may use, and what says so."""

    gib: float
    source: str


@dataclass(frozen=True)
class Run:
    """Everything that could be read.

    updates, heldout: lines of metrics.jsonl. beats, ends: of the ranks in life `attempt`. ending: of that life's job.
    """

    folder: Path
    label: str
    config: Config | None
    updates: tuple[dict[str, float], ...]
    heldout: tuple[dict[str, float], ...]
    plan: Plan | None
    result: Result | None
    commit: Commit | None
    preflights: dict[int, Preflight]
    attempt: int
    ending: Ending | None
    spans: tuple[Span, ...]
    hangs: tuple[Hang, ...]
    beats: tuple[Beat, ...]
    ends: tuple[End, ...]
    limit: Limit | None
    evaluations: tuple[Evaluation, ...]
    missing: tuple[str, ...]

    @property
    def total(self) -> int | None:
        """Updates of the whole run, as far as that is known."""
        if self.plan is not None and self.plan.updates_in_run is not None:
            return self.plan.updates_in_run
        return self.config.train.updates if self.config is not None else None


def read(folder: Path, label: str) -> Run:
    """The run in `folder`. Raises UserError where that is no run folder."""
    if not (folder / runfolder.CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {runfolder.CONFIG}")
    reader = Reader(folder)
    config = _or_missing(reader, lambda: compose.from_run(folder))
    lines = reader.metrics()
    plan = reader.json(runfolder.PLAN, Plan, f"{runfolder.PLAN}: not there, `prefix-train plan RUN` writes it")
    result = reader.json(runfolder.RESULT, Result, f"{runfolder.RESULT}: the run is not complete")
    commit = reader.json(f"{runfolder.CODE}/COMMIT.json", Commit, "code/COMMIT.json: not there", masked=False)
    attempt = _or_missing(reader, lambda: runfolder.current_attempt(folder)) or 0
    reports = {  # preflight masks what it writes, knowing the secrets of its own environment
        number: reader.json(name, Preflight, f"{name}: preflight has not ended", masked=False)
        for number in reader.numbered(runfolder.PREFLIGHT)
        for name in [f"{runfolder.PREFLIGHT}/{number}/report.json"]
    }
    if not reports:
        reader.missing.append(f"{runfolder.PREFLIGHT}: no preflight was run")
    beats = [beat for beat in _or_missing(reader, lambda: heartbeat.read(folder)) or [] if beat.attempt == attempt]
    ends = [end for end in _or_missing(reader, lambda: heartbeat.read_ends(folder)) or [] if end.attempt == attempt]
    ending = reader.json(runfolder.END, Ending)
    ending = ending if ending is not None and ending.attempt == attempt else None
    hangs = tuple(lives.hangs(reader))
    return Run(
        folder=folder,
        label=label,
        config=config,
        updates=tuple(line for line in lines if "loss" in line),
        heldout=tuple(line for line in lines if "heldout_loss" in line),
        plan=plan,
        result=result,
        commit=commit,
        preflights={number: report for number, report in reports.items() if report is not None},
        attempt=attempt,
        ending=ending,
        hangs=hangs,
        spans=tuple(lives.spans(reader, attempt, reports, hangs, ends, result is not None, ending)),
        beats=tuple(beats),
        ends=tuple(ends),
        limit=_limit(reader, config) if config is not None else None,
        evaluations=evaluations.read(reader),
        missing=tuple(reader.missing),
    )


def labels(folders: Sequence[Path]) -> list[str]:
    """A name for each run, no two alike."""
    names = [folder.absolute().name for folder in folders]
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _or_missing(reader: Reader, ask: Callable[[], Found]) -> Found | None:
    """`ask`'s answer; where a file of the run is in the way, that is said."""
    try:
        with runfolder.reading():
            return ask()
    except UserError as error:
        reader.missing.append(str(error).replace(f"{reader.run}/", ""))
        return None


def _limit(reader: Reader, config: Config) -> Limit | None:
    """The memory that was planned for each GPU; none on a CPU."""
    if not config.slurm.gpus_per_node:
        return None
    if config.engine == "stream":
        return None if config.stream.budget_gib is None else Limit(config.stream.budget_gib, "stream.budget_gib")
    try:
        if not lengths.exists(config):
            reader.missing.append("memory's budget: the lengths of the data are not here, see `prefix-train plan`")
            return None
        with runfolder.reading():
            predicted = budget.predict(config, lengths.largest_pack(config, lengths.load(config)))
    except UserError as error:
        reader.missing.append(f"memory's budget: {error}")
        return None
    return Limit(predicted.total("gpu") / GIB, "prefix-train budget, of the largest pack")
