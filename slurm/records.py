"""Reads a JSON file of a run folder as the record that it was written as, so that damage is found in one place."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from configs.runfolder import Damaged
from slurm.evidence import UNREADABLE

Record = TypeVar("Record")


def read(path: Path, kind: type[Record]) -> Record:
    """The record in `path`. Raises Damaged where it is none, and OSError."""
    return decode(path.read_bytes(), kind, path)


def decode(text: bytes, kind: type[Record], path: Path) -> Record:
    """The record in `text`, a part of `path`. Fields that `kind` does not have are left out. Raises Damaged."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE as error:
        raise Damaged(f"{path} is damaged: {error}") from error
