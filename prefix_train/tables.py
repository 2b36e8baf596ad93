"""Chat rows in parquet files, in a folder of them, or in a folder that `datasets` has saved.

The columns `messages`, `targets`, `id`, `tools` and `images` are read, others are not. A table has every key in every
row: keys that are null are left out. Images as bytes, alone or as `datasets` has them, become data URIs. Needs pyarrow,
which is imported where a table is opened. No torch.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.wording import shown
from prefix_train.rows import Line, check_name, decode_row

COLUMNS = ("id", "messages", "targets", "tools", "images")

IMAGES = ("image", "images", "bytes")
"""Where bytes may stand."""

SAVED, SPLITS = "state.json", "dataset_dict.json"
"""What `datasets` writes into a folder: of one split, and of several."""

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files and folders by which `datasets` tells splits apart."""

AT_ONCE = 64
"""Rows that become Python objects at a time."""


def is_table(path: Path) -> bool:
    """Whether `path` is to be read as a table: a parquet file, or a folder with one or saved by `datasets`."""
    if not path.is_dir():
        return path.suffix == ".parquet"
    return any((path / name).is_file() for name in (SAVED, SPLITS)) or next(path.rglob("*.parquet"), None) is not None


def files_of(path: Path) -> list[Path]:
    """The files that hold the rows of `path`, in their order; of a file that is no table itself.

    Raises UserError where a folder holds several splits, or is not what `datasets` saves, or a name is not UTF-8.
    """
    if not path.is_dir():
        return [check_name(path)]
    if (path / SPLITS).is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / SAVED).is_file())
        one = "train" if "train" in splits or not splits else splits[0]
        raise UserError(f"{path} holds the splits {', '.join(splits)}: name one, as in {path / one}")
    if (path / SAVED).is_file():
        return _saved(path)
    files = sorted(check_name(file) for file in path.rglob("*.parquet"))
    splits = sorted({split for file in files if (split := _split_of(file.relative_to(path)))})
    if len(splits) > 1:
        raise UserError(f"{path} holds the splits {', '.join(splits)}: name one file, or a folder with one split")
    return files


def _split_of(file: Path) -> str:
    """The split that a file in a folder is of, by its own name or that of a folder; empty where none says so."""
    if found := re.match(r"(.+)-\d+-of-\d+$", file.stem):
        return found[1]
    words = [word for part in file.with_suffix("").parts for word in re.split(r"[^a-z]+", part.lower())]
    return next((split for word in reversed(words) for split, names in SPLIT_NAMES.items() if word in names), "")


def _saved(path: Path) -> list[Path]:
    try:
        state = json.loads((path / SAVED).read_bytes())
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
        selected = state.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / SAVED} is not what `datasets` saves; save the data again ({error!r})") from error
    if selected:
        raise UserError(f"{path}: an old version of `datasets` saved a selection of rows here; save it with a new one")
    return [check_name(path / name) for name in names]


@dataclass(frozen=True)
class _File:
    """An open file: its rows, and how many; groups: [G] the number of rows before the end of each row group."""

    path: Path
    reader: Any
    columns: list[str]
    groups: list[int]


class Table:
    """Rows of a table; `start` of one is its number in all files. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Raises UserError without pyarrow, or where a file cannot be read or has no column `messages`."""
        self._folder = path if path.is_dir() else path.parent
        self._files = [_open(file) for file in files_of(path)]
        self._ends = list(accumulate(file.groups[-1] if file.groups else 0 for file in self._files))
        if not self._ends or not self._ends[-1]:
            raise UserError(f"{path}: the table has no rows")
        self._kept: tuple[int, int] | None = None
        self._group: Any = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Line]:
        number = 0
        for place, file in enumerate(self._files):
            for index in range(len(file.groups)):
                with self._lock:
                    group = self._load(place, index)
                for first in range(0, group.num_rows, AT_ONCE):
                    for row in _values(group.slice(first, AT_ONCE)):
                        yield self._line(place, number, row)
                        number += 1

    def line(self, source: str, start: int, length: int) -> Line:
        """The row of number `start`; the group of rows that was read last stays in memory."""
        place = bisect_right(self._ends, start)
        before = self._ends[place - 1] if place else 0
        groups = self._files[place].groups
        index = bisect_right(groups, start - before)
        first = before + (groups[index - 1] if index else 0)
        with self._lock:
            (row,) = _values(self._load(place, index).slice(start - first, 1))
        return self._line(place, start, row)

    def record(self, line: Line) -> Any:
        """The row as JSON has it. Raises UserError where it holds what JSON has not."""
        return decode_row(line)

    def folder(self, line: Line) -> Path:
        """The folder that was given, or where the file is."""
        return self._folder

    def _load(self, place: int, index: int) -> Any:
        if self._kept != (place, index):
            self._kept, self._group = None, None
            file = self._files[place]
            self._group, self._kept = _reading(file.path, lambda: _group(file, index)), (place, index)
        return self._group

    def _line(self, place: int, number: int, row: dict[str, Any] | str) -> Line:
        before = self._ends[place - 1] if place else 0
        source = f"{self._files[place].path}:{number - before + 1}"
        try:
            if isinstance(row, str):
                raise _NoJson(row)
            record = _plain(row)
            if isinstance(record.get("id"), int):
                record["id"] = str(record["id"])
            return Line(source, number, json.dumps(record, default=_refuse).encode())
        except _NoJson as error:
            return Line(source, number, b"", str(error))


class _NoJson(Exception):
    """What is wrong with a row."""


def _values(rows: Any) -> list[dict[str, Any] | str]:
    """The rows of a piece of a table as Python has them, or what is wrong with one."""
    try:
        return list(rows.to_pylist())
    except (ValueError, OverflowError) as error:
        if len(rows) > 1:
            return [value for index in range(len(rows)) for value in _values(rows.slice(index, 1))]
        if isinstance(error, UnicodeDecodeError):
            return ["a text is not UTF-8; write it as UTF-8"]
        return [f"a value cannot be read: {error}"]


def _open(path: Path) -> _File:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: reading tables needs pyarrow: pip install pyarrow") from error
    if path.suffix == ".parquet":
        reader = _reading(path, lambda: pq.ParquetFile(path))
        sizes = [reader.metadata.row_group(index).num_rows for index in range(reader.metadata.num_row_groups)]
        names = reader.schema_arrow.names
    else:
        reader = _reading(path, lambda: pa.ipc.open_stream(pa.memory_map(str(path))).read_all())
        sizes, names = [reader.num_rows], reader.column_names
    if "messages" not in names:
        raise UserError(f"{path}: the table has no column messages; it has {', '.join(names)}")
    return _File(path, reader, [name for name in COLUMNS if name in names], list(accumulate(sizes)))


def _group(file: _File, index: int) -> Any:
    if file.path.suffix == ".parquet":
        return file.reader.read_row_group(index, columns=file.columns)
    return file.reader.select(file.columns)


def _reading(path: Path, read: Any) -> Any:
    import pyarrow as pa

    try:
        return read()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a readable table: {str(error).splitlines()[0]}") from error


def _plain(value: Any, key: str = "") -> Any:
    """`value`, which stands under `key`, as JSON has it: no null in an object, images as paths or data URIs."""
    if isinstance(value, bytes):
        if key not in IMAGES:
            raise _NoJson(f"{key} holds bytes; write a text, or an image as bytes under image")
        return f"data:image/*;base64,{base64.b64encode(value).decode()}"
    if isinstance(value, list):
        return [_plain(one, key) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes | None):
        return _plain(value["path"] if value["bytes"] is None else value["bytes"], key)
    return {name: _plain(one, name) for name, one in value.items() if one is not None}


def _refuse(value: Any) -> Any:
    raise _NoJson(f"{shown(value)} is no text, number, list or object; write it as a text")
