"""Chat JSONL -> examples. Every bad row is one error line with file and line; nothing is ever truncated."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from configs.errors import UserError
from prefix_train import chat
from prefix_train.chat import shown
from prefix_train.render import Example, Renderer

MAX_LINE_BYTES = 256 << 20
"""A longer line is no chat row; it would only fill the memory."""

KEPT_TOKENS = 1 << 24

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Examples(Sequence[Example]):
    """The examples of a file in its order; `skipped` holds one line for each row that was left out."""

    def __init__(self, examples: Sequence[Example], skipped: Sequence[str] = ()) -> None:
        self._examples = examples
        self.skipped = list(skipped)

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        return self._examples[index]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file: `source` is `file:line`, `start` its first byte, `digest` of `content` as it stands there."""

    source: str
    start: int
    content: bytes

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.content, digest_size=16).digest()


class FileExamples(Sequence[Example]):
    """Examples of one file; those that were used last are in memory, the others are rendered again when asked for.

    So the memory is that of the cache, whatever the file's size. Safe to use from several threads.
    """

    def __init__(self, path: Path, renderer: Renderer, kept_tokens: int) -> None:
        """kept_tokens: most tokens of examples in memory, at about 50 bytes each; one example is always kept."""
        self._path, self._renderer, self._kept_tokens = path, renderer, kept_tokens
        self._places: list[tuple[str, int, int, bytes]] = []
        self._kept: OrderedDict[int, Example] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def add(self, line: Line, example: Example) -> None:
        """Append `example`, rendered from `line`."""
        self._places.append((line.source, line.start, len(line.content), line.digest))
        self._keep(len(self._places) - 1, example)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
            else:
                self._keep(number, self._read_again(number))
            return self._kept[number]

    def _read_again(self, number: int) -> Example:
        source, start, length, digest = self._places[number]
        with self._path.open("rb") as file:
            file.seek(start)
            line = Line(source, start, file.read(length))
        if line.digest != digest:
            raise UserError(f"{source}: the row has changed since the data was read; start again")
        return self._renderer.render(decode_row(line), source, self._path.parent)

    def _keep(self, number: int, example: Example) -> None:
        self._kept[number] = example
        self._tokens += len(example.ids)
        while self._tokens > self._kept_tokens and len(self._kept) > 1:
            self._tokens -= len(self._kept.popitem(last=False)[1].ids)


def load_examples(
    path: Path,
    renderer: Renderer,
    max_tokens: int,
    on_bad: Literal["stop", "skip"] = "stop",
    kept_tokens: int = KEPT_TOKENS,
) -> Examples:
    """All examples of the chat JSONL file `path`, every image decoded and checked.

    max_tokens: the longest example accepted. kept_tokens: see FileExamples. Raises UserError for the first bad row, or
    with `skip` leaves bad rows out and lists them; a file that cannot be read or has no good row is an error in either
    case.
    """
    examples = FileExamples(path, renderer, kept_tokens)
    skipped: list[str] = []
    names: dict[str, str] = {}
    for line in read_lines(path):
        try:
            example = renderer.render(decode_row(line), line.source, path.parent)
            if len(example.ids) > max_tokens:
                raise UserError(
                    f"{line.source}: the example has {len(example.ids):,} tokens, more than the cap of {max_tokens:,}; "
                    "raise data.max_example_tokens or pack.max_positions, or shorten it"
                )
            _claim(names, example.id, line.source)
        except UserError as error:
            if on_bad == "stop":
                raise
            skipped.append(str(error))
        else:
            examples.add(line, example)
    if not examples:
        raise UserError(f"{path}: no good example: all {len(skipped)} were skipped, the first because {skipped[0]}")
    return Examples(examples, skipped)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, row) of each row of the chat JSONL file `path`, its structure checked, ids unique.

    Raises UserError for the first bad row; images are not looked at.
    """
    names: dict[str, str] = {}
    for line in read_lines(path):
        row = decode_row(line)
        conversation = chat.parse(row, line.source)
        _claim(names, line.source if conversation.id is None else conversation.id, line.source)
        yield line.source, row


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


def _claim(names: dict[str, str], name: str, source: str) -> None:
    if (first := names.setdefault(name, source)) != source:
        raise UserError(f"{source}: the id {shown(name)} is already that of {first}; ids are unique")
