"""How a run stands, from its folder and from what Slurm says of its job; where the two disagree, that is said."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import yaml

from configs import runfolder
from configs.compose import from_run
from configs.schema import Config
from prefix_train import heartbeat
from prefix_train.heartbeat import Beat, End
from preflight import drain
from slurm import deadlines, ending, life, presence, records, verdict
from slurm.evidence import UNREADABLE
from slurm.finish import ENDED_WELL
from slurm.presence import Presence
from slurm.scheduler import JobState

RECENT = 20
"""Updates whose median time makes the forecast."""
TAIL_BYTES = 1 << 16
"""As much of metrics.jsonl as is read."""
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Reads every value as text; in C where PyYAML was built so."""
LIVELY_S = 120.0
"""A heartbeat younger than this contradicts a job that has ended."""


@dataclass(frozen=True)
class Standing:
    """One run. age_s: since the newest heartbeat. left_s: until its last update, at its present speed."""

    run: Path
    job: str | None
    slurm: JobState | None
    attempt: int
    ranks: int
    heard: int
    """Ranks that gave a heartbeat in this life."""
    phase: str | None
    age_s: float | None
    update: int
    updates: int | None
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    verdict: str | None
    end: str | None
    """How the run or its last life ended."""
    doubts: tuple[str, ...]
    """Where Slurm and the run folder do not agree."""
    unwatched: tuple[str, ...]
    """Nodes of this life whose watchers have died."""

    def document(self) -> dict[str, Any]:
        """For programs."""
        slurm = None if self.slurm is None else self.slurm._asdict()
        return {
            **vars(self),
            "run": str(self.run),
            "slurm": slurm,
            "doubts": list(self.doubts),
            "unwatched": list(self.unwatched),
        }


# What is read here of files that hold more.


@dataclass(frozen=True)
class _Line:
    """Of metrics.jsonl; seconds: only where the line is of an update."""

    update: int
    seconds: float | None = None
    loss: float | None = None
    logical_tokens_per_s: float | None = None


@dataclass(frozen=True)
class _Plan:
    updates_in_run: int | None = None


@dataclass(frozen=True)
class _Result:
    heldout_loss: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class _Ending:
    cause: str | None = None
    why: str = ""


def job_of(run: Path) -> str | None:
    """Id of the Slurm job that was submitted last for `run`. Raises Damaged."""
    path = run / runfolder.JOB
    if not path.exists():
        return None
    found = path.read_bytes().strip()
    if not re.fullmatch(rb"\d+(_\d+)?", found):
        raise runfolder.Damaged(f"{path} is damaged: the number of a job is expected")
    return found.decode()


def options(run: Path) -> Config:
    """Of the options of `run` those that are asked for here; the others are at their defaults.

    All of them, checked, take fifty times as long, and a folder may hold a thousand runs. Where one of these is not
    there, or does not fit, `from_run` says what is wrong, or reads what `to_yaml` did not write.
    """
    try:
        found = yaml.load((run / runfolder.CONFIG).read_bytes(), LOADER)
        few = {"slurm": ("nodes", "tasks_per_node"), "train": ("updates",)}
        asked = {section: {name: found[section][name] for name in names} for section, names in few.items()}
        asked |= {name: found[name] for name in ("cluster", "watch")}
        return msgspec.convert(asked, Config, strict=False)
    except (yaml.YAMLError, LookupError, TypeError, OSError, *UNREADABLE):
        return from_run(run)


def look(run: Path, slurm: JobState | None, now: float) -> Standing:
    """Everything that is known of `run`; now: seconds since 1970. Raises Damaged where one of its files is."""
    config, attempt = options(run), runfolder.current_attempt(run)
    beats = [beat for beat in heartbeat.read(run) if beat.attempt == attempt]
    ends = [end for end in heartbeat.read_ends(run) if end.attempt == attempt]
    metrics = [line for line in _tail(run / runfolder.METRICS) if line.seconds is not None]
    newest = max((beat.time for beat in beats), default=None)
    update = metrics[-1].update if metrics else 0
    updates = _updates(run, config)
    pace = median(line.seconds or 0.0 for line in metrics[-RECENT:]) if metrics else None
    return Standing(
        run=run,
        job=job_of(run),
        slurm=slurm,
        attempt=attempt,
        ranks=config.ranks,
        heard=len(beats),
        phase=_phase(beats, ends),
        age_s=None if newest is None else now - newest,
        update=update,
        updates=updates,
        loss=metrics[-1].loss if metrics else None,
        tokens_per_s=metrics[-1].logical_tokens_per_s if metrics else None,
        left_s=None
        if pace is None or updates is None or (run / runfolder.RESULT).exists()
        else pace * (updates - update),
        verdict=verdict.latest(run, attempt),
        end=_end(run, attempt),
        doubts=tuple(_doubts(run, config, slurm, beats, ends, now)),
        unwatched=tuple(map(_unwatched, presence.lost(run, attempt))),
    )


def _updates(run: Path, config: Config) -> int | None:
    """Updates of the whole run, as far as that is known before and without its plan."""
    plan = run / runfolder.PLAN
    found = records.read(plan, _Plan).updates_in_run if plan.exists() else None
    return config.train.updates if found is None else found


def _tail(path: Path) -> list[_Line]:
    """The last whole lines of metrics.jsonl."""
    if not path.exists():
        return []
    with path.open("rb") as stream:
        start = max(0, path.stat().st_size - TAIL_BYTES)
        stream.seek(start)
        *whole, _ = stream.read().split(b"\n")
    return [records.decode(line, _Line, path) for line in whole[1 if start else 0 :]]


def _phase(beats: Sequence[Beat], ends: Sequence[End]) -> str | None:
    """Where the rank is that is furthest behind."""
    ended = {end.rank for end in ends}
    running = [beat for beat in beats if beat.rank not in ended]
    if not running:
        return "ended" if ends else None
    last = min(running, key=lambda beat: (beat.update, beat.completed, beat.rank))
    return f"{last.phase} of update {last.update}" if last.update else last.phase


def _end(run: Path, attempt: int) -> str | None:
    if (bad := ending.bad(run, attempt)) is not None:
        return bad.line  # also where there is a result: it is written before it is judged
    if (run / runfolder.RESULT).exists():
        result = asdict(records.read(run / runfolder.RESULT, _Result))
        figures = [f"{name.replace('_', ' ')} {figure:.4g}" for name, figure in result.items() if figure is not None]
        return ", ".join(["complete", *figures])
    path = run / runfolder.LIVES / f"{attempt}.json"
    if not path.exists() or (told := records.read(path, _Ending)).cause is None:
        return None
    return f"life {attempt} ended: {told.cause}; {told.why}"


def _doubts(
    run: Path, config: Config, slurm: JobState | None, beats: Sequence[Beat], ends: Sequence[End], now: float
) -> list[str]:
    """What of the one does not fit the other."""
    doubts: list[str] = []
    ended = {end.rank for end in ends}
    running = [beat for beat in beats if beat.rank not in ended]
    if slurm is None:
        return doubts
    late = deadlines.overdue(running, config.watch, "", 0.0, now)
    if slurm.running and late:
        doubts.append(f"Slurm says {slurm.state}, but rank {late[0].beat.rank} is late: {late[0].sentence}")
    bad = [end for end in ends if end.status not in ENDED_WELL]
    if slurm.running and bad and now - max(end.time for end in bad) > LIVELY_S:
        doubts.append(f"Slurm says {slurm.state}, but rank {bad[0].rank} failed {now - bad[0].time:.0f} s ago")
    lively = [beat for beat in running if now - beat.time < LIVELY_S]
    if slurm.over and lively:
        beat = max(lively, key=lambda beat: beat.time)
        doubts.append(
            f"Slurm says {slurm.state}, but rank {beat.rank} on {beat.host} was alive {now - beat.time:.0f} s ago"
        )
    complete = (run / runfolder.RESULT).exists()
    if slurm.state.startswith("COMPLETED") and not complete:
        doubts.append(f"Slurm says {slurm.state}, but there is no {runfolder.RESULT}")
    if slurm.over and not slurm.state.startswith("COMPLETED") and complete:
        doubts.append(f"Slurm says {slurm.state}, but there is a {runfolder.RESULT}")
    return doubts


def _unwatched(lost: Presence) -> str:
    when = time.strftime("%F %T", time.localtime(lost.gone))
    return f"the watcher of {lost.host} died at {when}: nobody watches that node"


def lives_of(run: Path) -> list[str]:
    """One line per life of a Slurm job."""
    lines = []
    for one in life.read(run):
        how = one.cause or "has not ended, or nobody could say how"
        without = f"; from then on without {', '.join(one.excluded)}" if one.excluded else ""
        lines.append(f"life {one.attempt} on {', '.join(one.nodes)}: {how} at update {one.update}{without}")
    return lines


def drains(run: Path) -> list[str]:
    """Commands by which an administrator takes the nodes out of service that this run found to be at fault.

    Where a life points to all of several nodes none is odd, and none is named.
    """
    found: dict[str, str] = {}
    for one in life.read(run):
        odd = one.culprits if len(one.culprits) < max(2, len(one.nodes)) else ()
        found |= {node: drain.command(node, f"{one.cause} at update {one.update} of {run.name}") for node in odd}
    return list(found.values())
