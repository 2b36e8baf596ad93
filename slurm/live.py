"""What a local run shows while it trains: the lines of rank 0's log, as they come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO


class LiveLog:
    """Copies what is added to a log file to standard output, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        """Begin at the present end of `path`, which need not exist yet."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._stream: BinaryIO | None = None

    def show(self, *, rest: bool = False) -> None:
        """Print what has come since the last call; with `rest` also a last line without its end."""
        if self._stream is None:
            if not self._path.exists():
                return
            self._stream = self._path.open("rb")
        self._stream.seek(self._offset)
        found = self._stream.read()
        whole = found if rest else found[: found.rfind(b"\n") + 1]
        self._offset += len(whole)
        sys.stdout.write(whole.decode(errors="replace"))
        sys.stdout.flush()
