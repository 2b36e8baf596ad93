"""Chat rows of a file or a folder -> examples. Every bad row is one error line; nothing is ever truncated."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from configs.errors import UserError
from prefix_train import chat, tables
from prefix_train.chat import shown
from prefix_train.render import Example, Renderer
from prefix_train.rows import JsonLines, Line, Rows, decode_row

KEPT_TOKENS = 1 << 24


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


class FileExamples(Sequence[Example]):
    """Examples of some rows; those that were used last are in memory, the others are rendered again when asked for.

    So the memory is that of the cache, whatever the file's size. Safe to use from several threads.
    """

    def __init__(self, rows: Rows, renderer: Renderer, kept_tokens: int) -> None:
        """kept_tokens: most tokens of examples in memory, at about 50 bytes each; one example is always kept."""
        self._rows, self._renderer, self._kept_tokens = rows, renderer, kept_tokens
        self._places: list[tuple[str, int, int, bytes]] = []
        self._kept: OrderedDict[int, Example] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def add(self, line: Line, example: Example) -> None:
        """Append `example`, made by `render` from `line`."""
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
                self._keep(number, self.render(self._same(*self._places[number])))
            return self._kept[number]

    def render(self, line: Line) -> Example:
        """The example of `line`. Raises UserError for whatever is wrong with the row."""
        place = line.source, line.start, len(line.content), line.digest
        return self._renderer.render(
            decode_row(line), line.source, self._rows.folder, lambda: decode_row(self._same(*place))
        )

    def _same(self, source: str, start: int, length: int, digest: bytes) -> Line:
        line = self._rows.line(source, start, length)
        if line.digest != digest:
            raise UserError(f"{source}: the row has changed since the data was read; start again")
        return line

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
    """All examples of the file or folder `path` (see `rows_of`), every image decoded and checked.

    max_tokens: the longest example accepted. kept_tokens: see FileExamples. Raises UserError for the first bad row, or
    with `skip` leaves bad rows out and lists them; a file that cannot be read or has no good row is an error in either
    case.
    """
    rows = rows_of(path)
    examples = FileExamples(rows, renderer, kept_tokens)
    skipped: list[str] = []
    names: dict[str, str] = {}
    for line in rows:
        try:
            example = examples.render(line)
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


def rows_of(path: Path) -> Rows:
    """The rows of `path`: chat JSONL, a parquet file, a folder of them, or one that `datasets` has saved."""
    return tables.Table(path) if tables.is_table(path) else JsonLines(path)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, row) of each row of the chat JSONL file `path`, its structure checked, ids unique.

    Raises UserError for the first bad row; images are not looked at.
    """
    names: dict[str, str] = {}
    for line in JsonLines(path):
        row = decode_row(line)
        conversation = chat.parse(row, line.source)
        _claim(names, line.source if conversation.id is None else conversation.id, line.source)
        yield line.source, row


def _claim(names: dict[str, str], name: str, source: str) -> None:
    if (first := names.setdefault(name, source)) != source:
        raise UserError(f"{source}: the id {shown(name)} is already that of {first}; ids are unique")
