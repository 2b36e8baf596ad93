"""Rows of chat JSONL: which bytes of a file are one, and what JSON they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from configs.errors import UserError
from prefix_train import strict_json

MAX_LINE_BYTES = 256 << 20
"""A longer line is no chat row; it would only fill the memory."""

PACKED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A row: `source` is `file:line`, `start` where it is found again, `digest` that of `content`, its JSON.

    wrong: what is wrong with a row that has no content.
    """

    source: str
    start: int
    content: bytes
    wrong: str = ""

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.content, digest_size=16).digest()


class Rows(Protocol):
    """Rows that can be read in their order, and each again. What is wrong with one alone, `record` says."""

    def __iter__(self) -> Iterator[Line]: ...

    def line(self, source: str, start: int, length: int) -> Line:
        """The row that was `source` at `start` with `length` bytes, as it is now."""

    def record(self, line: Line) -> Any:
        """The chat row that `line` holds, not yet checked. Raises UserError where it holds no JSON."""

    def folder(self, line: Line) -> Path:
        """Paths of images in `line` are below it."""


@dataclass(frozen=True)
class JsonLines:
    """The lines of a file that are not blank. Lines end with LF or CR LF; `start` is a line's first byte."""

    path: Path

    def __iter__(self) -> Iterator[Line]:
        """Raises UserError where the file cannot be read or has no such line."""
        return read_lines(self.path)

    def line(self, source: str, start: int, length: int) -> Line:
        """The `length` bytes at `start`."""
        with self.path.open("rb") as file:
            file.seek(start)
            return Line(source, start, file.read(length))

    def record(self, line: Line) -> Any:
        """See `decode_row`."""
        return decode_row(line)

    def folder(self, line: Line) -> Path:
        """Where the file is."""
        return self.path.parent


def check_name(path: Path) -> Path:
    """`path`, whose name stands in results as UTF-8. Raises UserError where it cannot."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown_path = str(path).encode(errors="backslashreplace").decode()
        raise UserError(f"{shown_path}: the name is not UTF-8; give it another one") from None
    return path


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank.

    Lines end with LF or CR LF. Raises UserError where the file cannot be read or has no such line.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; write the path of a chat JSONL file")
    if not path.is_file():
        raise UserError(f"{path}: not a file; write the path of a chat JSONL file")
    if path.suffix in PACKED:
        raise UserError(f"{path}: the file is compressed; unpack it")
    empty = True
    try:
        with path.open("rb") as file:
            for line in _lines(file, path):
                if line.wrong or line.content.removeprefix(BYTE_ORDER_MARK).strip():
                    empty = False
                    yield line
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if empty:
        raise UserError(f"{path}: the file is empty; write one row per line")


def _lines(file: BinaryIO, path: Path) -> Iterator[Line]:
    """All lines; one that is too long without its content, which is read over."""
    start, number = 0, 0
    while content := file.readline(MAX_LINE_BYTES + 1):
        number, size, long = number + 1, len(content), len(content) > MAX_LINE_BYTES
        while long and content and not content.endswith(b"\n"):
            content = file.readline(MAX_LINE_BYTES + 1)
            size += len(content)
        wrong = f"the line is longer than {MAX_LINE_BYTES:,} bytes" if long else ""
        yield Line(f"{path}:{number}", start, b"" if long else content, wrong)
        start += size


def decode_row(line: Line) -> Any:
    """The JSON value of one line, a byte order mark at the start of the file dropped.

    Raises UserError, beginning with `file:line`, where it is none.
    """
    if line.wrong:
        raise UserError(f"{line.source}: {line.wrong}")
    source, content = line.source, line.content if line.start else line.content.removeprefix(BYTE_ORDER_MARK)
    try:
        return strict_json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        if content.startswith(BYTE_ORDER_MARK):
            mark = "a byte order mark stands here, as where files were joined; remove it"
            raise UserError(f"{source}: {mark}") from error
        whole = content.strip() == b"{" or content.lstrip().startswith(b"[") or error.msg == "Extra data"
        hint = "; write each row on one line of its own, without a list around them" if whole else ""
        raise UserError(f"{source}: broken JSON at character {error.pos + 1}: {error.msg}{hint}") from error
    except RecursionError:
        raise UserError(f"{source}: the JSON is nested too deeply; a chat row has four levels") from None
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
