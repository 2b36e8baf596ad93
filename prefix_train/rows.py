"""Rows of chat JSONL: which bytes of a file are one, and what JSON they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from configs.errors import UserError
from prefix_train.chat import shown

MAX_LINE_BYTES = 256 << 20
"""A longer line is no chat row; it would only fill the memory."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A row: `source` is `file:line`, `start` where it is found again, `digest` that of `content`, its JSON."""

    source: str
    start: int
    content: bytes

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.content, digest_size=16).digest()


class Rows(Protocol):
    """Rows that can be read in their order, and each again. folder: paths of images are below it."""

    @property
    def folder(self) -> Path: ...
    def __iter__(self) -> Iterator[Line]: ...

    def line(self, source: str, start: int, length: int) -> Line:
        """The row that was `source` at `start` with `length` bytes, as it is now."""


@dataclass(frozen=True)
class JsonLines:
    """The lines of a file that are not blank. Lines end with LF or CR LF; `start` is a line's first byte."""

    path: Path

    @property
    def folder(self) -> Path:
        """Where the file is."""
        return self.path.parent

    def __iter__(self) -> Iterator[Line]:
        """Raises UserError where the file cannot be read or has no such line."""
        return read_lines(self.path)

    def line(self, source: str, start: int, length: int) -> Line:
        """The `length` bytes at `start`."""
        with self.path.open("rb") as file:
            file.seek(start)
            return Line(source, start, file.read(length))


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank.

    Lines end with LF or CR LF. Raises UserError where the file cannot be read or has no such line.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; write the path of a chat JSONL file")
    if not path.is_file():
        raise UserError(f"{path}: not a file; write the path of a chat JSONL file")
    empty, start = True, 0
    try:
        with path.open("rb") as file:
            for number, content in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                line = Line(f"{path}:{number}", start, content)
                if len(content) > MAX_LINE_BYTES:
                    raise UserError(f"{line.source}: the line is longer than {MAX_LINE_BYTES:,} bytes")
                if content.removeprefix(BYTE_ORDER_MARK).strip():
                    empty = False
                    yield line
                start += len(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if empty:
        raise UserError(f"{path}: the file is empty; write one chat row per line")


def decode_row(line: Line) -> Any:
    """The JSON value of one line, a byte order mark at the start of the file dropped.

    Raises UserError, beginning with `file:line`, where it is none.
    """
    source, content = line.source, line.content if line.start else line.content.removeprefix(BYTE_ORDER_MARK)
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: broken JSON at character {error.pos + 1}: {error.msg}") from error
    except RecursionError:
        raise UserError(f"{source}: the JSON is nested too deeply; a chat row has four levels") from None
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(double)} stands twice in one object; write it once")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value; write a number or null")
