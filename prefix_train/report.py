"""What a run tells: metrics.jsonl, TensorBoard files, trackers, and progress on a terminal or as plain lines.

Rank 0 reports, the others hold a reporter that does nothing. Everything about an update is reported before its
checkpoint is saved; a resumed run drops what came after its checkpoint, so that its metrics are those of an unbroken
run.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs import runfolder
from configs.schema import Config
from configs.wording import counted
from prefix_train.trackers import CLOSE_S, HASTE_S, Trackers


@dataclass(frozen=True)
class Update:
    """What one update did, over all ranks; counts are of what ran."""

    update: int
    """Number of the update, from 1."""
    epoch: float
    """Passes over the training examples, this update included."""
    loss: float
    """The weighted sum that was minimised."""
    target_loss: float
    """Sum of the cross-entropy over all examples' target tokens."""
    example_loss: float
    """Sum over examples of the mean over their target tokens."""
    lr: float
    grad_norm: float
    """Global norm before clipping."""
    packs: int
    examples: int
    targets: int
    """Target tokens, counted in every example."""
    positions: int
    logical_tokens: int
    seconds: float
    memory_bytes: int
    """Most memory in use so far, on the rank that used most: the GPU's, on a CPU the process's."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Figures that only some configurations have, by their names in metrics.jsonl."""


def figures(done: Update) -> dict[str, float]:
    """The line of metrics.jsonl: counts, means and rates of an update. Raises ValueError where one is not finite."""
    line: dict[str, float] = {
        "update": done.update,
        "epoch": done.epoch,
        "loss": done.loss,
        "loss_per_target": done.target_loss / done.targets,
        "loss_per_example": done.example_loss / done.examples,
        "lr": done.lr,
        "grad_norm": done.grad_norm,
        "packs": done.packs,
        "examples": done.examples,
        "targets": done.targets,
        "positions": done.positions,
        "logical_tokens": done.logical_tokens,
        "seconds": done.seconds,
        "positions_per_s": done.positions / done.seconds,
        "logical_tokens_per_s": done.logical_tokens / done.seconds,
        "memory_bytes": done.memory_bytes,
        **done.more,
    }
    for name, value in line.items():
        if not math.isfinite(value):
            raise ValueError(f"update {done.update}: {name} is {value}")
    return line


def memory_bytes(device: torch.device) -> int:
    """Most memory that this process had in use: on a GPU what torch allocated, on a CPU the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Linux, where getrusage's peak is inherited from the process that started this one.
        return int(status.read_text(encoding="ascii").split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that is still being written (no line feed yet) is left out.

    Raises ValueError naming the line where one is not a JSON object with an `update`.
    """
    path = run / runfolder.METRICS
    if not path.exists():
        return []
    lines = []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if not isinstance(line, dict) or type(line.get("update")) is not int:
            raise ValueError(f"{path}:{number}: an object with an update is expected")
        lines.append(line)
    return lines


def totals(run: Path) -> dict[str, Any]:
    """What all of a run's updates did together, over all of its lives; empty before the first."""
    done = [line for line in read_metrics(run) if "loss" in line]
    if not done:
        return {}
    sums = ("packs", "examples", "targets", "positions", "logical_tokens", "seconds")
    return {
        "updates": len(done),
        "loss_first": done[0]["loss"],
        "loss_last": done[-1]["loss"],
        **{name: sum(line[name] for line in done) for name in sums},
        "memory_bytes": max(line["memory_bytes"] for line in done),
    }


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line; a line is on the disk when `append` returns."""

    def __init__(self, run: Path, resumed: int) -> None:
        """Keep the lines up to update `resumed`, whole. Raises ValueError where one of them is missing or double."""
        self.run, self.path = run, run / runfolder.METRICS
        kept = [line for line in read_metrics(run) if line["update"] <= resumed]
        numbers = [line["update"] for line in kept if "loss" in line]
        if numbers != list(range(1, resumed + 1)):
            wrong = next(n for n in range(1, resumed + 2) if numbers[n - 1 : n] != [n])
            raise ValueError(f"{self.path}: update {wrong} of {resumed} that the checkpoint holds is missing or double")
        runfolder.write_text(self.path, "".join(map(_line, kept)), run=run)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one object. Raises StaleAttempt where the run has gone on to a later life."""
        runfolder.check_attempt(self.run)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(_line(line))
            stream.flush()
            os.fsync(stream.fileno())


class Reporter:
    """Tells about one life of a run. `resumed`: updates of the checkpoint that it goes on from.

    config: of the run, which names its trackers; none: there are none. Raises UserError, on rank 0, where one of them
    cannot be started before the run's first update.
    stream: where progress goes; a bar (rich) if it is a terminal, else a line every `every_s` seconds.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        total: int,
        resumed: int = 0,
        config: Config | None = None,
        stream: TextIO | None = None,
        every_s: float = 10.0,
    ) -> None:
        self.run, self.rank = run, rank
        if rank != 0:
            return
        self._metrics = MetricsFile(run, resumed)
        # Imported by the rank that writes: the import alone costs others memory and a third of a second.
        from torch.utils.tensorboard import SummaryWriter

        goes_on = resumed > 0 or runfolder.process_attempt() > 0
        with ExitStack() as opened:
            self._board = SummaryWriter(str(run / runfolder.TENSORBOARD), purge_step=resumed + 1 if resumed else None)
            opened.callback(self._board.close)
            self._progress = _progress(stream or sys.stderr, total, resumed, every_s)
            opened.callback(self._progress.close)
            self._trackers = None if config is None else Trackers(run, config, goes_on, self.say)
            self._opened = opened.pop_all()

    def updated(self, done: Update) -> None:
        """Report a finished update."""
        if self.rank == 0:
            line = figures(done)
            self._record(done.update, line)
            self._progress.updated(line)

    def evaluated(self, update: int, values: Mapping[str, float]) -> None:
        """Report an evaluation after `update` updates, before that update's checkpoint; names begin `heldout_`."""
        if self.rank == 0:
            line = {f"heldout_{name}": value for name, value in values.items()}
            self._record(update, {"update": update, **line})
            self.say(f"update {update}: " + ", ".join(f"{name} {value:.4g}" for name, value in line.items()))

    def say(self, text: str) -> None:
        """One line for people."""
        if self.rank == 0:
            self._progress.say(text)

    def close(self, haste: bool = False) -> None:
        """Finish the trackers, the files and the progress display. haste: do not wait for trackers."""
        if self.rank == 0:
            with self._opened:
                if self._trackers is not None:
                    self._trackers.close(HASTE_S if haste else CLOSE_S)

    def finish(self) -> dict[str, Any]:
        """Say what the run did, all lives together, and where to look; the totals (empty on other ranks)."""
        if self.rank != 0:
            return {}
        done = totals(self.run)
        for text in final_lines(self.run, done):
            self.say(text)
        trackers = self._trackers.close() if self._trackers is not None else {}
        return done | ({"trackers": trackers} if trackers else {})

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close(haste=kind is not None)
        except (OSError, runfolder.StaleAttempt) as later:
            if error is None:
                raise
            error.add_note(f"closing the reports then failed too: {later}")

    def _record(self, update: int, line: Mapping[str, float]) -> None:
        self._metrics.append(line)
        values = {name: value for name, value in line.items() if name != "update"}
        for name, value in values.items():
            self._board.add_scalar(name, value, update)
        if self._trackers is not None:
            self._trackers.log(values, update)


def final_lines(run: Path, done: Mapping[str, Any]) -> list[str]:
    """The last lines of a training run."""
    if not done:
        return ["no update was done"]
    times, curves = done["logical_tokens"] / done["positions"], run / runfolder.TENSORBOARD
    return [
        f"{counted(done['updates'], 'update')} in {_clock(done['seconds'])}: loss {done['loss_first']:.4f} -> "
        f"{done['loss_last']:.4f}; {done['positions']:,} positions for {done['logical_tokens']:,} logical tokens "
        f"({times:.1f} times), {done['positions'] / done['seconds']:,.0f} positions/s",
        f"metrics: {run / runfolder.METRICS}; curves: {shlex.join(['tensorboard', '--logdir', str(curves)])}",
    ]


class _Lines:
    """Progress as plain lines."""

    def __init__(self, stream: TextIO, total: int, resumed: int, every_s: float) -> None:
        self.stream, self.total, self.every_s = stream, total, every_s
        self.first, self.begin, self.last = resumed + 1, time.monotonic(), -math.inf

    def updated(self, line: Mapping[str, float]) -> None:
        now, number = time.monotonic(), int(line["update"])
        if now - self.last < self.every_s and number not in (self.first, self.total):
            return
        self.last = now
        left = (now - self.begin) / (number - self.first + 1) * (self.total - number)
        self.say(f"update {number}/{self.total}  {_summary(line)}  {_clock(left)} left")

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """Progress as a bar on a terminal."""

    def __init__(self, stream: TextIO, total: int, resumed: int) -> None:
        columns = (TextColumn("update"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[text]}"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=stream, highlight=False))
        self.task = self.bar.add_task("train", total=total, completed=resumed, text="")
        self.bar.start()

    def updated(self, line: Mapping[str, float]) -> None:
        text = f"loss {line['loss']:.4f} {line['logical_tokens_per_s']:,.0f} logical tokens/s{_streamed(line)}"
        self.bar.update(self.task, completed=int(line["update"]), text=text)

    def say(self, text: str) -> None:
        self.bar.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


def _progress(stream: TextIO, total: int, resumed: int, every_s: float) -> _Lines | _Bar:
    return _Bar(stream, total, resumed) if stream.isatty() else _Lines(stream, total, resumed, every_s)


def _summary(line: Mapping[str, float]) -> str:
    return (
        f"loss {line['loss']:.4f}  lr {line['lr']:.2e}  grad {line['grad_norm']:.3g}  "
        f"{line['positions_per_s']:,.0f} positions/s  {line['logical_tokens_per_s']:,.0f} logical tokens/s  "
        f"{line['memory_bytes'] / 2**30:.2f} GiB{_streamed(line)}"
    )


def _streamed(line: Mapping[str, float]) -> str:
    """What passed through where weights do, and the share of the least time in the update's; nothing elsewhere."""
    if "stream_blocks" not in line:
        return ""
    share = f", {line['stream_share']:.0%} of the bound" if "stream_share" in line else ""
    return f"  {counted(round(line['stream_blocks']), 'block')} read, {line['stream_gb_s']:.1f} GB/s{share}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n"
