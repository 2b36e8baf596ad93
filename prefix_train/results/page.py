"""`prefix-train report`: one HTML page of one run, or of several side by side, that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs import runfolder
from configs.errors import UserError
from prefix_train.budget import GIB
from prefix_train.results import charts, document, lives, scores, tables
from prefix_train.results import run as runs_module
from prefix_train.results.charts import Bar, Chart, Level, Mark, Series
from prefix_train.results.lives import Span
from prefix_train.results.run import Run
from prefix_train.results.tables import Table, when

WELL = ("complete", "stopped")
OVER_UPDATES = (
    ("loss", "Loss", "", True),
    ("lr", "Learning rate", "", False),
    ("grad_norm", "Gradient norm, before clipping", "", True),
    ("positions_per_s", "Positions per second", "", False),
    ("logical_tokens_per_s", "Logical tokens per second", "", False),
    ("stream_gb_s", "Weights that passed through, GB per second", "", False),
    ("stream_share", "Share of the least time in an update's, where weights pass through", "", False),
)
"""Figure of metrics.jsonl, title, unit, whether it may be logarithmic."""


@dataclass(frozen=True)
class Part:
    """What stands on the page of one run alone."""

    run: Run
    state: str
    tables: tuple[Table, ...]
    preflights: tuple[tuple[int, bool, str], ...]
    """(life, passed, headline)."""
    environment: tuple[Table, ...]
    pictures: tuple[Chart, ...]


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`. Raises UserError where one is no run folder, or is given twice."""
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"{folders[index]} is given twice")
    return [runs_module.read(*pair) for pair in zip(folders, runs_module.labels(folders), strict=True)]


def place_of(folders: Sequence[Path], out: Path | None) -> Path:
    """Where the page goes: `out`; of one run its own folder; of several the working folder."""
    if out is not None:
        return out
    return folders[0] / runfolder.REPORT if len(folders) == 1 else Path(runfolder.REPORT)


def write(runs: Sequence[Run], place: Path) -> None:
    """Write the page of `runs`. Raises UserError where it cannot be written."""
    document.write(render(runs), place, "--out")


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    return document.render(
        Path(__file__).parent / "page.html",
        title=" / ".join(run.label for run in runs),
        runs=runs,
        figures=tables.figures(runs),
        curves=curves(runs),
        options=tables.options(runs),
        parts=[_part(run, index) for index, run in enumerate(runs)],
    )


def curves(runs: Sequence[Run]) -> list[Chart]:
    """What is drawn over updates, all runs in the same axes."""
    drawn = []
    for name, title, unit, log in OVER_UPDATES:
        series = [Series(run.label, index, _points(run, name)) for index, run in enumerate(runs)]
        drawn.append(charts.lines(name, title, series, unit=unit, log=log))
    held = [
        Series(run.label, index, [(line["update"], line["heldout_loss"]) for line in run.heldout], dots=True)
        for index, run in enumerate(runs)
    ]
    drawn.insert(1, charts.lines("heldout", "Held-out loss", held))
    memory = [Series(run.label, index, _points(run, "memory_bytes", GIB)) for index, run in enumerate(runs)]
    levels = [
        Level(f"{run.label}, planned", index, run.limit.gib) for index, run in enumerate(runs) if run.limit is not None
    ]
    title = "Most memory so far, GiB, " + (
        "against what was planned" if levels else "of a GPU, or on a CPU the process"
    )
    drawn.append(charts.lines("memory", title, memory, levels, " GiB"))
    return [one for one in drawn if one is not None]


def time_line(run: Run, key: str) -> Chart | None:
    """Lives and hangs over time, or, where times cannot be right, in their order."""
    times = lives.timed(run.spans, run.hangs, lives.newest_sign(run.beats, run.hangs))
    in_order = times is None
    if times is None:
        times = [(float(place), place + 1.0) for place in range(len(run.spans))]
    bars = [
        Bar(one.attempt, begin, end, _state(one), _words(one))
        for one, (begin, end) in zip(run.spans, times, strict=True)
    ]
    places = {bar.number: bar for bar in bars}
    marks = []
    for hang in run.hangs:
        bar = places.get(-1 if hang.attempt is None else hang.attempt)
        if bar is None:
            continue
        known = hang.alarm is not None and not in_order
        at = hang.alarm.time if known and hang.alarm else bar.end
        said = hang.verdict.sentence if hang.verdict else "not judged"
        marks.append(Mark(hang.number, at, f"hang {hang.number} in life {bar.number}: {said}"))
    title = "Lives and hangs, in their order: the files' times are not known" if in_order else "Lives and hangs"
    return charts.time_line(key, title, bars, marks, in_order)


def _part(run: Run, index: int) -> Part:
    plan, result = run.plan, run.result
    newest = max(run.preflights, default=None)
    pictures = [time_line(run, f"time{index}")]
    if plan is not None:
        counts = plan.histogram
        pictures.append(charts.histogram(f"lengths{index}", "Lengths of examples", counts.edges, counts.examples))
    shown = [
        tables.lives(run),
        tables.hangs(run),
        tables.endings(run),
        tables.packs(plan) if plan is not None else None,
        scores.table(run.evaluations),
        scores.sample(run.evaluations),
        tables.verify(result.verify) if result is not None and result.verify is not None else None,
        tables.problems(run.preflights[newest]) if newest is not None else None,
    ]
    return Part(
        run=run,
        state=tables.state(run),
        tables=tuple(tables.cut(table) for table in shown if table is not None),
        preflights=tuple((life, found.passed, found.headline) for life, found in sorted(run.preflights.items())),
        environment=tuple(tables.environments(run.preflights[newest])) if newest is not None else (),
        pictures=tuple(one for one in pictures if one is not None),
    )


def _points(run: Run, name: str, unit: float = 1.0) -> list[tuple[float, float]]:
    return [(line["update"], line[name] / unit) for line in run.updates if name in line]


def _state(one: Span) -> str:
    return "open" if one.cause is None else "well" if one.cause in WELL else "bad"


def _words(one: Span) -> str:
    how = one.cause or "not known, or not ended"
    return f"life {one.attempt} from {when(one.began)} to {when(one.ended)}: {how}"
