"""What a local run shows while it trains: the lines of rank 0's log as they come, and on a terminal a bar."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs import runfolder

PROGRESS = re.compile(r"update \d+/(\d+)  ")
"""How rank 0 reports progress in its log, where there is no terminal."""

MISTAKE = "error: "
"""How a rank's log tells a user's mistake, which may be the job's last line too."""


class Follower:
    """What is added to a file, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        """Begin at the present end of `path`, which need not exist yet."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self, *, rest: bool = False) -> list[str]:
        """Lines since the last call; with `rest` also a last one that has not ended."""
        if not self._path.exists():
            return []
        self._offset = min(self._offset, self._path.stat().st_size)  # a resumed run drops metrics past its checkpoint
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            found = stream.read()
        whole = found if rest else found[: found.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


class Live:
    """Shows a run's progress on `stream`; `updates`: how many there will be, if that is known already."""

    def __init__(self, run: Path, updates: int | None, stream: TextIO = sys.stdout) -> None:
        self._log = Follower(run / runfolder.LOGS / "rank0.log")
        self._metrics = Follower(run / runfolder.METRICS)
        self._stream = stream
        self._held: list[str] = []
        self._bar: Progress | None = None
        if stream.isatty():
            columns = (TextColumn("update"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=stream, highlight=False))
            self._task = self._bar.add_task("train", total=updates, text="")

    def show(self, *, rest: bool = False) -> None:
        """Show what has come since the last call, without mistakes: see `show_held`; with `rest` to the very end."""
        for line in self._log.lines(rest=rest):
            if line.startswith(MISTAKE):
                self._held.append(line)
                continue
            progress = PROGRESS.match(line)
            if self._bar is None:
                print(line, file=self._stream, flush=True)
            elif progress:
                self._bar.update(self._task, total=int(progress[1]))
            else:
                self._bar.console.print(line, markup=False, soft_wrap=True)
        if self._bar is not None:
            self._move(self._bar)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def show_held(self, last: str) -> None:
        """Show the mistakes that the log told, but for `last`: the job says that itself."""
        for line in self._held:
            if line != last:
                print(line, file=self._stream, flush=True)

    def _move(self, bar: Progress) -> None:
        updates = [line for line in map(json.loads, self._metrics.lines()) if "logical_tokens_per_s" in line]
        if not updates:
            return
        bar.start()
        last = updates[-1]
        text = f"loss {last['loss']:.4f} {last['logical_tokens_per_s']:,.0f} logical tokens/s"
        bar.update(self._task, completed=last["update"], text=text)
