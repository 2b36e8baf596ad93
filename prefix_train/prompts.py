"""A folder of prompts: long instructions as texts of their own, and beside each the items that they are for.

One set of instructions is a folder with `system.md` (or `system.txt`), `items.jsonl` and, wherever in it, images. A
folder of such folders is several sets. An item is

    {"input": text, "target": text, "id"?: text, "image"?: path, "images"?: [path, ...], "meta"?: anything}

with `targets`, a list, in place of `target` where it has several answers. Its images stand before its text; `input` may
also be a list of parts as in chat rows. Paths of images are below the set's folder. The instructions are read as text,
line ends as LF, white space at both ends left out. Anything else in the folder is an error, for it would be data that
silently is not learned; only names that begin with a dot, and README.md, are passed over. No torch.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.wording import shown
from prefix_train.rows import JsonLines, Line, check_name, decode_row

ITEMS, SYSTEM = "items.jsonl", ("system.md", "system.txt")

IMAGES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"))

KEYS = ("id", "input", "image", "images", "target", "targets", "meta")

FORM = f"a set of instructions is a folder with {SYSTEM[0]}, {ITEMS} and images"


@dataclass(frozen=True)
class _Set:
    """One set of instructions: its folder and its text."""

    folder: Path
    instructions: str

    @property
    def items(self) -> JsonLines:
        return JsonLines(self.folder / ITEMS)


class Prompts:
    """The items of all sets in the order of their folders' names, as chat rows. `start` of one counts bytes of all."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where `path` is no folder of prompts, or something in it is no part of one."""
        self._sets = [_read(folder) for folder in sets_of(path)]
        sizes = [one.items.path.stat().st_size for one in self._sets]
        self._begins = [0, *accumulate(sizes)][:-1]

    def __iter__(self) -> Iterator[Line]:
        for begin, one in zip(self._begins, self._sets, strict=True):
            for line in one.items:
                yield Line(line.source, begin + line.start, line.content, line.wrong)

    def line(self, source: str, start: int, length: int) -> Line:
        """The item of `length` bytes at `start`."""
        place = self._place(start)
        found = self._sets[place].items.line(source, start - self._begins[place], length)
        return Line(source, start, found.content)

    def record(self, line: Line) -> Any:
        """The item as a chat row. Raises UserError where it is none."""
        place = self._place(line.start)
        item = decode_row(Line(line.source, line.start - self._begins[place], line.content, line.wrong))
        return _row(item, self._sets[place].instructions, line.source)

    def folder(self, line: Line) -> Path:
        """The set's folder."""
        return self._sets[self._place(line.start)].folder

    def _place(self, start: int) -> int:
        return bisect_right(self._begins, start) - 1


def is_prompts(path: Path) -> bool:
    """Whether `path` is a folder that somebody means as one of prompts."""
    names = (ITEMS, *SYSTEM)
    return path.is_dir() and any((folder / name).is_file() for folder in (path, *_folders(path)) for name in names)


def sets_of(path: Path) -> list[Path]:
    """The folders of the sets in `path`: itself, or those in it. Raises UserError as `Prompts` does."""
    if not is_prompts(path):
        raise UserError(f"{path}: no folder of data: it holds no parquet file, was not saved by `datasets`, and {FORM}")
    if any((path / name).exists() for name in (ITEMS, *SYSTEM)):
        _check(path)
        return [path]
    for entry in _entries(path):
        if not entry.is_dir():
            raise UserError(f"{entry}: neither a set of instructions nor part of one: {FORM}; remove it")
    folders = _folders(path)
    for folder in folders:
        _check(folder)
    return folders


def files_of(path: Path) -> list[Path]:
    """What decides the rows: the instructions and items of every set. Raises UserError as `Prompts` does."""
    return [file for folder in sets_of(path) for file in (_system(folder), folder / ITEMS)]


def _folders(path: Path) -> list[Path]:
    return [entry for entry in _entries(path) if entry.is_dir()]


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(check_name(entry) for entry in path.iterdir() if not _ignored(entry.name))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _ignored(name: str) -> bool:
    return name.startswith(".") or name == "README.md"


def _check(folder: Path) -> None:
    """Raise UserError unless `folder` is one set of instructions and nothing else."""
    _system(folder)
    if not (folder / ITEMS).is_file():
        raise UserError(f"{folder}: there is no {ITEMS}: {FORM}")
    todo = [folder]
    while todo:
        for entry in _entries(todo.pop()):
            top = entry.parent == folder
            if entry.is_dir() and not entry.is_symlink():
                todo.append(entry)
                continue
            if (top and entry.name in (ITEMS, *SYSTEM)) or entry.suffix.lower() in IMAGES:
                continue
            near = difflib.get_close_matches(entry.name, (ITEMS, *SYSTEM), 1, 0.8) if top else []
            hint = f"did you mean {near[0]}?" if near else f"{FORM}; remove it"
            raise UserError(f"{entry}: no part of a set of instructions: {hint}")


def _system(folder: Path) -> Path:
    found = [folder / name for name in SYSTEM if (folder / name).is_file()]
    if len(found) != 1:
        what = f"holds both {' and '.join(SYSTEM)}; remove one" if found else f"there is no {SYSTEM[0]}: {FORM}"
        raise UserError(f"{folder}: {what}")
    return found[0]


def _read(folder: Path) -> _Set:
    file = _system(folder)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if not text:
        raise UserError(f"{file}: the file is empty; write the instructions that the items share")
    if "\0" in text:
        raise UserError(f"{file}: the text holds a NUL character; remove it")
    return _Set(folder, text)


def _row(item: Any, instructions: str, source: str) -> dict[str, Any]:
    """The chat row of an item."""
    if not isinstance(item, dict):
        raise UserError(f'{source}: the item is no object; write {{"input": ..., "target": ...}}')
    for key in item:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS)}"
            raise UserError(f"{source}: the item has the unknown key {shown(key)}; {hint}")
    for one, several in (("target", "targets"), ("image", "images")):
        if one in item and several in item:
            raise UserError(f"{source}: the item has both {one} and {several}; leave one out")
    if "target" not in item and "targets" not in item:
        raise UserError(f"{source}: the item has no target; write the answer that is to be learned")
    if not isinstance(item.get("target", ""), str):
        raise UserError(f"{source}: target is no text; write the answer, or several as a list of targets")
    row = {key: item[key] for key in ("id", "meta", "targets") if key in item}
    row["messages"] = [
        {"role": "system", "content": instructions},
        {"role": "user", "content": _content(item, source)},
    ]
    if "target" in item:
        row["messages"].append({"role": "assistant", "content": item["target"]})
    return row


def _content(item: dict[str, Any], source: str) -> Any:
    """What the user says: the item's images, then its input."""
    images = [item["image"]] if "image" in item else item.get("images", [])
    if not isinstance(images, list):
        raise UserError(f"{source}: images is no list; write a list of paths, or one path as image")
    if "input" not in item and not images:
        raise UserError(f"{source}: the item has no input; write the text that its target answers")
    given = item.get("input", [])
    if not isinstance(given, str | list):
        raise UserError(f"{source}: input is no text; write a text or a list of parts")
    if not images:
        return given
    parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
    return [*({"type": "image", "image": image} for image in images), *parts]
