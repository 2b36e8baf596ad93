"""Chat rows of a file or a folder -> examples. Every bad row is one error line; nothing is ever truncated."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from configs.errors import UserError
from configs.wording import counted, shown
from prefix_train import chat, tables
from prefix_train.prompts import Prompts
from prefix_train.render import Example, Renderer
from prefix_train.rows import JsonLines, Line, Rows, check_name

KEPT_TOKENS = 1 << 24


class Examples(Sequence[Example]):
    """The examples of a file in its order.

    skipped: one line for each that was left out. too_long: (`file:line`, tokens) of those among them that are longer
    than the cap.
    """

    def __init__(
        self, examples: Sequence[Example], skipped: Sequence[str] = (), too_long: Sequence[tuple[str, int]] = ()
    ) -> None:
        self._examples = examples
        self.skipped = list(skipped)
        self.too_long = list(too_long)

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
        self._places: list[tuple[str, int, int, bytes, int | None]] = []
        self._kept: OrderedDict[int, Example] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def add(self, line: Line, target: int | None, example: Example) -> None:
        """Append `example`, made by `render` from `line` and `target`."""
        self._places.append((line.source, line.start, len(line.content), line.digest, target))
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
                source, start, length, digest, target = self._places[number]
                line = self._same(source, start, length, digest)
                self._keep(number, self.render(line, self._rows.record(line), target))
            return self._kept[number]

    def render(self, line: Line, record: Any, target: int | None) -> Example:
        """The example of `line`, which holds `record`. Raises UserError for whatever is wrong with the row.

        target: of several which one, see `chat.targets_of`.
        """
        place, rows = (line.source, line.start, len(line.content), line.digest), self._rows
        return self._renderer.render(
            record, line.source, rows.folder(line), lambda: rows.record(self._same(*place)), target
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
    too_long: list[tuple[str, int]] = []
    names: dict[str, str] = {}

    def good(line: Line, record: Any, target: int | None) -> Example:
        example = examples.render(line, record, target)
        if len(example.ids) > max_tokens:
            too_long.append((example.source, len(example.ids)))
            raise UserError(
                f"{example.source}: the example has {len(example.ids):,} tokens, more than the cap of {max_tokens:,}; "
                "raise data.max_example_tokens or pack.max_positions, or shorten it"
            )
        _claim(names, example.id, example.source)
        return example

    for line, target, record in _each(rows, on_bad, skipped):
        try:
            examples.add(line, target, good(line, record, target))
        except UserError as error:
            if on_bad == "stop":
                raise
            skipped.append(str(error))
    if not examples:
        raise UserError(f"{path}: no good example among {counted(len(skipped), 'row')}: {skipped[0]}")
    return Examples(examples, skipped, too_long)


def _each(rows: Rows, on_bad: Literal["stop", "skip"], skipped: list[str]) -> Iterator[tuple[Line, int | None, Any]]:
    """Every target of every row, and the row; rows that hold no JSON are added to `skipped`, or raise UserError."""
    for line in rows:
        try:
            record = rows.record(line)
            targets = chat.targets_of(record, line.source)
        except UserError as error:
            if on_bad == "stop":
                raise
            skipped.append(str(error))
            continue
        for target in targets:
            yield line, target, record


def rows_of(path: Path) -> Rows:
    """The rows of `path`: chat JSONL, a parquet file, a folder of them or one saved by `datasets`, or of prompts.

    Raises UserError where its name is not UTF-8.
    """
    check_name(path)
    if tables.is_table(path):
        return tables.Table(path)
    return Prompts(path) if path.is_dir() else JsonLines(path)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, row) of each row of the chat JSONL file `path`, its structure checked, ids unique.

    Raises UserError for the first bad row; images are not looked at.
    """
    names: dict[str, str] = {}
    rows = JsonLines(path)
    for line in rows:
        record = rows.record(line)
        for target in chat.targets_of(record, line.source):
            source = chat.place_of(line.source, target)
            conversation = chat.parse(record, source, target)
            _claim(names, source if conversation.id is None else conversation.id, source)
        yield line.source, record


def _claim(names: dict[str, str], name: str, source: str) -> None:
    if (first := names.setdefault(name, source)) != source:
        raise UserError(f"{source}: the id {shown(name)} is already that of {first}; ids are unique")
