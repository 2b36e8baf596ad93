"""Chat JSONL -> examples. Every bad row is one error line with file and line; nothing is ever truncated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from configs.errors import UserError
from prefix_train import chat
from prefix_train.chat import shown
from prefix_train.render import Example, Renderer

MAX_LINE_BYTES = 256 << 20
"""A longer line is no chat row; it would only fill the memory."""


class Examples(Sequence[Example]):
    """The examples of a file in its order; `skipped` holds one line for each row that was left out."""

    def __init__(self, examples: Sequence[Example], skipped: Sequence[str] = ()) -> None:
        self._examples = tuple(examples)
        self.skipped = list(skipped)

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...

    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self._examples[index]


def load_examples(
    path: Path, renderer: Renderer, max_tokens: int, on_bad: Literal["stop", "skip"] = "stop"
) -> Examples:
    """All examples of the chat JSONL file `path`, every image decoded and checked.

    max_tokens: the longest example accepted. Raises UserError for the first bad row, or with `skip` leaves bad rows
    out and lists them; a file that cannot be read or has no good row is an error in either case.
    """
    examples: list[Example] = []
    skipped: list[str] = []
    names: dict[str, str] = {}
    for source, line in read_lines(path):
        try:
            example = renderer.render(decode_row(line, source), source, path.parent)
            if len(example.ids) > max_tokens:
                raise UserError(
                    f"{source}: the example has {len(example.ids):,} tokens, more than the cap of {max_tokens:,}; "
                    "raise data.max_example_tokens or pack.max_positions, or shorten it"
                )
            _claim(names, example.id, source)
        except UserError as error:
            if on_bad == "stop":
                raise
            skipped.append(str(error))
            continue
        examples.append(example)
    if not examples:
        raise UserError(f"{path}: no good example: all {len(skipped)} were skipped, the first because {skipped[0]}")
    return Examples(examples, skipped)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, row) of each row of the chat JSONL file `path`, its structure checked, ids unique.

    Raises UserError for the first bad row; images are not looked at.
    """
    names: dict[str, str] = {}
    for source, line in read_lines(path):
        row = decode_row(line, source)
        conversation = chat.parse(row, source)
        _claim(names, source if conversation.id is None else conversation.id, source)
        yield source, row


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(`file:line`, bytes) of each line that is not blank; a byte order mark at the start is dropped.

    Lines end with LF or CR LF. Raises UserError where the file cannot be read or has no such line.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; write the path of a chat JSONL file")
    if not path.is_file():
        raise UserError(f"{path}: not a file; write the path of a chat JSONL file")
    empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                source = f"{path}:{number}"
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(f"{source}: the line is longer than {MAX_LINE_BYTES:,} bytes; is this chat JSONL?")
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if content.strip():
                    empty = False
                    yield source, content
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if empty:
        raise UserError(f"{path}: the file is empty; write one chat row per line")


def decode_row(line: bytes, source: str) -> Any:
    """The JSON value of one line. Raises UserError, beginning with `source`, where it is none."""
    try:
        return json.loads(line.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: broken JSON at column {error.colno}: {error.msg}") from error
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


def _claim(names: dict[str, str], name: str, source: str) -> None:
    if (first := names.setdefault(name, source)) != source:
        raise UserError(f"{source}: the id {shown(name)} is already that of {first}; ids are unique")
