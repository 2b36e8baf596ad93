"""The last collectives of one rank, in a small file that is mapped into its memory.

What a rank has written is there for others at once, also while it hangs with the interpreter lock held, and after it
was killed: the kernel keeps the pages. The file lies on the node's own disk. Each record has a fixed size and carries
a checksum, so a reader tells a record that is being written. No torch here: watchers read it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from configs.nodefolder import private_folder

RECORDS = 512
"""Records that are kept: one update of two packs of a model with 64 sharded layers, and some of the one before."""

CALLED, DONE, RAISED = range(3)
"""States of a collective. CALLED: it is not known to be over."""
STATES = ("called", "done", "raised")

_MAGIC = b"prefix1\n"
_HEAD = struct.Struct("<8sIIII")
_HEAD_BYTES = 64
_SUM = struct.Struct("<I")
_BODY = struct.Struct("<BqqqqddB16s32s24s16s160s216s")
_RECORD_BYTES = 528
_TRIES = 5
"""How often a reader looks at a record that is being written; a rank killed at that moment never finishes it."""

assert _SUM.size + _BODY.size <= _RECORD_BYTES


class BadRing(ValueError):
    """A file that is not the ring of the rank it should be: which file, and what is wrong with it."""


class Record(NamedTuple):
    """One collective. Texts that are too long lose their end, `where` its beginning."""

    place: int
    """Place among all collectives of the rank."""
    number: int
    """Place among the collectives of its group, from 0."""
    update: int
    pack: int
    started: float
    """CLOCK_MONOTONIC of the node, seconds."""
    ended: float
    """0: not known to be over."""
    state: int
    phase: str
    group: str
    kind: str
    dtype: str
    sizes: str
    """Shapes of the input tensors: `3x4,7`; a scalar's is empty. `-`: no input."""
    where: str
    """`file:line`."""


@dataclass(frozen=True)
class Contents:
    """What a ring held. records: oldest first. torn: how many could not be read, because they were being written."""

    pid: int
    attempt: int
    records: tuple[Record, ...]
    torn: int


def path_of(run: Path, rank: int, attempt: int) -> Path:
    """Where a rank of this node keeps its ring."""
    name = hashlib.sha256(f"{socket.gethostname()}\0{run.resolve()}".encode()).hexdigest()[:16]
    return private_folder() / "rings" / f"{name}-{rank}-{attempt}"


def remove_earlier(path: Path) -> None:
    """Remove the rings that earlier lives of the rank left."""
    stem, _, attempt = path.name.rpartition("-")
    for other in path.parent.glob(f"{stem}-*"):
        if int(other.name.rpartition("-")[2]) < int(attempt):
            other.unlink(missing_ok=True)


class Ring:
    """The writer's side: one process, which locks around `put` itself."""

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, exist_ok=True)
        size = _HEAD_BYTES + RECORDS * _RECORD_BYTES
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with aside.open("w+b") as stream:
            stream.truncate(size)
            self._map = mmap.mmap(stream.fileno(), size)
        _HEAD.pack_into(self._map, 0, _MAGIC, RECORDS, rank, attempt, os.getpid())
        aside.replace(path)

    def put(self, record: Record) -> None:
        """Write `record` into its place, over the one that was there."""
        body = _BODY.pack(
            1,
            *record[:7],
            _head(record.phase, 16),
            _head(record.group, 32),
            _head(record.kind, 24),
            _head(record.dtype, 16),
            _head(record.sizes, 160),
            record.where.encode(errors="replace")[-216:],
        )
        at = _HEAD_BYTES + record.place % RECORDS * _RECORD_BYTES
        self._map[at : at + _SUM.size + _BODY.size] = _SUM.pack(zlib.crc32(body)) + body

    def close(self, remove: bool = False) -> None:
        """Leave the file for readers, or remove it."""
        self._map.close()
        if remove:
            self.path.unlink(missing_ok=True)


def read(path: Path) -> Contents:
    """What the ring at `path` holds. Raises BadRing, and OSError where there is none."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size != _HEAD_BYTES + RECORDS * _RECORD_BYTES:
            raise BadRing(f"{path}: {size} bytes, not a ring")
        with mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            magic, records, _, attempt, pid = _HEAD.unpack_from(mapped, 0)
            if magic != _MAGIC or records != RECORDS:
                raise BadRing(f"{path}: not a ring of this version")
            found = [_read_one(mapped, place) for place in range(RECORDS)]
    whole = sorted(record for record in found if isinstance(record, Record))
    return Contents(pid, attempt, tuple(whole), sum(record is False for record in found))


def shapes(text: str) -> tuple[tuple[int, ...], ...]:
    """`Record.sizes` as numbers; of a text that was too long the shapes that are whole."""
    if text == "-":
        return ()
    parts = text.split(",")
    if len(text.encode()) >= 160:
        parts.pop()
    return tuple(tuple(map(int, part.split("x"))) if part else () for part in parts)


def _head(text: str, size: int) -> bytes:
    return text.encode(errors="replace")[:size]


def _read_one(mapped: mmap.mmap, place: int) -> Record | bool | None:
    """The record; None: none was written there; False: it is being written."""
    at = _HEAD_BYTES + place * _RECORD_BYTES
    for _ in range(_TRIES):
        raw = mapped[at : at + _SUM.size + _BODY.size]
        if not any(raw[: _SUM.size + 1]):
            return None
        if zlib.crc32(raw[_SUM.size :]) == _SUM.unpack_from(raw)[0]:
            _, *numbers, phase, group, kind, dtype, sizes, where = _BODY.unpack_from(raw, _SUM.size)
            texts = [text.rstrip(b"\0").decode(errors="replace") for text in (phase, group, kind, dtype, sizes, where)]
            return Record(*numbers, *texts)
    return False
