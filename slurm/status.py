"""`python -m slurm.status [RUN]`: how one run, or every run of a folder, stands.

Slurm and the heartbeats are asked separately: either may be silent, stale or wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from configs import runfolder
from configs.console import make_app, print_json
from configs.console import run as run_app
from configs.errors import UserError
from slurm import scheduler, standing
from slurm.standing import Standing

PATIENCE_S = 10.0
"""How long Slurm's programs may take here: somebody is waiting."""


def find_runs(root: Path) -> list[Path]:
    """Run folders in `root`, the newest last."""
    found: dict[Path, float] = {}
    for pattern in ("*", "*/*"):
        for path in root.glob(f"{pattern}/{runfolder.CONFIG}"):
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                found[path.parent] = path.stat().st_mtime
    return sorted(found, key=found.__getitem__)


def look_at(runs: Sequence[Path]) -> tuple[list[Standing], list[str], dict[Path, str]]:
    """How `runs` stand, what did not answer, and of runs that cannot be read why; one that is gone is left out."""
    bad: dict[Path, str] = {}
    jobs = {run: job for run in runs for job in _read(run, bad, standing.job_of)}
    states, silences = scheduler.job_states([job for job in jobs.values() if job], PATIENCE_S)
    now, found = time.time(), []
    for run, job in jobs.items():
        state = states.get(job) if job else None
        found += _read(run, bad, partial(standing.look, slurm=state, now=now))
    return found, silences, {run: why for run, why in bad.items() if run.exists()}


Answer = TypeVar("Answer")


def _read(run: Path, bad: dict[Path, str], ask: Callable[[Path], Answer]) -> list[Answer]:
    """`ask`'s answer of `run`; none where the run cannot be read, and `bad` has the reason then."""
    try:
        with runfolder.reading():
            return [ask(run)]
    except UserError as error:
        bad[run] = str(error)
        return []


def table(found: Sequence[Standing]) -> str:
    """One line per run, and one more for each doubt and each node without a watcher."""
    rows: list[tuple[str, ...]] = [("run", "job", "slurm", "phase", "heard", "update", "loss", "tokens/s", "left")]
    rows += [_row(one) for one in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for number in reversed(range(len(found))):
        notes = [
            *found[number].doubts,
            *found[number].unwatched,
            *filter(None, (found[number].verdict, found[number].end)),
        ]
        lines[number + 2 : number + 2] = [f"    {note}" for note in notes]
    return "\n".join(lines)


def page(one: Standing) -> str:
    """All of one run; `admin`: what an administrator can do about nodes that were at fault."""
    slurm = "no job" if one.job is None else f"job {one.job}: {_slurm(one)}"
    if one.slurm is not None:
        slurm += f" ({one.slurm.reason}; {one.slurm.source} says so)"
    lines = [
        f"run      {one.run}",
        f"slurm    {slurm}",
        f"ranks    {one.heard} of {one.ranks} heard in life {one.attempt}; {one.phase or 'not begun'}; {_age(one)}",
        f"update   {one.update} of {one.updates or '?'}{_figures(one)}",
    ]
    lines += [f"life     {line.removeprefix('life ')}" for line in standing.lives_of(one.run)]
    lines += [f"admin    {command}" for command in standing.drains(one.run)]
    lines += [f"verdict  {one.verdict}"] if one.verdict else []
    lines += [f"end      {one.end}"] if one.end else []
    lines += [f"watch    {node}" for node in one.unwatched]
    lines += [f"doubt    {doubt}" for doubt in one.doubts]
    return "\n".join(lines)


def _row(one: Standing) -> tuple[str, ...]:
    return (
        one.run.name,
        one.job or "-",
        _slurm(one),
        one.phase or "-",
        f"{one.heard}/{one.ranks}" + (f" {_age(one)}" if one.age_s is not None else ""),
        f"{one.update}/{one.updates or '?'}",
        "-" if one.loss is None else f"{one.loss:.4f}",
        "-" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
        "-" if one.left_s is None else str(timedelta(seconds=round(one.left_s))),
    )


def _slurm(one: Standing) -> str:
    if one.job is None:
        return "-"
    return "not known" if one.slurm is None else one.slurm.state


def _age(one: Standing) -> str:
    if one.age_s is None:
        return "no heartbeat"
    return f"{one.age_s:.0f} s ago" if one.age_s > -1 else f"{-one.age_s:.0f} s ahead of this clock"


def _figures(one: Standing) -> str:
    if one.loss is None or one.tokens_per_s is None:
        return ""
    left = "" if one.left_s is None else f", {timedelta(seconds=round(one.left_s))} left"
    return f", loss {one.loss:.4f}, {one.tokens_per_s:,.0f} logical tokens/s{left}"


app = make_app("How runs stand, by Slurm and by their own heartbeats. Example: python -m slurm.status runs/demo-1")


@app.command()
def main(
    run: Annotated[Path | None, typer.Argument(help="Run folder; without one, all runs under --root.")] = None,
    root: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")] = False,
) -> int:
    """Exits with 0 where all runs could be read."""
    if run is not None and not (run / runfolder.CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {runfolder.CONFIG}")
    runs = [run.absolute()] if run is not None else find_runs(root.absolute())
    if not runs:
        raise UserError(f"there are no runs in {root}: give a run folder, or --root")
    found, silences, bad = look_at(runs)
    if run is not None and not found:
        raise UserError(bad.get(runs[0], f"{run} is gone"))
    print(page(found[0]) if run is not None else table(found))
    for silence in silences:
        print(f"no answer from Slurm: {silence}")
    for one, why in bad.items():
        print(f"{one.name} cannot be read: {why}")
    if as_json:
        unread = {str(one): why for one, why in bad.items()}
        print_json({"runs": [one.document() for one in found], "silent": silences, "unread": unread})
    return 1 if bad else 0


if __name__ == "__main__":
    run_app(app)
