"""The length index: what planning needs to know of the data, kept beside the runs so that submitting need not render.

`prefix-train plan` writes it, submit reads it in milliseconds and without torch. It holds for one state of data,
model, template and code; anything else is an error that names what differs. Each model and each set of options has a
file of its own; `pack.max_positions` is none of these options as long as packs hold every example. One `.npz` file of
integer arrays and JSON, read without unpickling.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from configs import runfolder
from configs.errors import UserError
from configs.modelpath import is_gguf, locate
from configs.schema import Config, ModelConfig
from prefix_train import prompts, tables
from prefix_train.budget import Shape
from prefix_train.plan import RunPlan, plan_training
from prefix_train.tree import Forest, Ints, Trie

RENDERER = (
    "chat",
    "data",
    "images",
    "prompts",
    "render",
    "rows",
    "strict_json",
    "tables",
    "template",
    "tokens",
    "tree",
)
"""Our modules that decide which tokens an example has and what examples share."""

BUILDER = ("tiny.py", "demo/*.txt", "demo/*.jinja")
"""What makes the processor of a model that is built instead of loaded."""

PROCESSOR_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*/*.jinja")
"""Files of a model folder that may decide how text and images become tokens."""

NOT_PROCESSOR = ("config.json", "generation_config.json", "*.index.json")

UNREADABLE = (OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What reading a truncated, damaged or foreign file may raise."""

FOREST = ("parent", "start", "length", "source", "last")


class Rendered(Protocol):
    """What an example has to have: see `prefix_train.render.Example`."""

    @property
    def source(self) -> str: ...
    @property
    def keys(self) -> Ints: ...
    @property
    def target(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True)
class Key:
    """What an index was made of, each as a sha256 or in words."""

    data: str
    """The data file's bytes. (Images are checked one by one: `LengthIndex.check`.)"""
    model: str
    """The model's configuration."""
    template: str
    """Tokenizer, processor and chat template."""
    renderer: str
    """Our code from row to tokens, and the versions of transformers and tokenizers."""
    options: str
    """Options that decide which examples there are and what becomes a node."""


@dataclass(frozen=True, eq=False)
class LengthIndex:
    """Lengths and forest of N examples, without their tokens.

    sources: [N] `file:line`. targets: [N] target tokens. fingerprints: [N] uint64 hashes of the examples' keys.
    skipped: one line for every row that was left out. stamp: size and modification time (ns) of the data file.
    """

    key: Key
    stamp: tuple[int, int]
    sources: tuple[str, ...]
    skipped: tuple[str, ...]
    targets: Ints
    fingerprints: NDArray[np.uint64]
    forest: Forest

    def __post_init__(self) -> None:
        if not len(self.sources) == len(self.targets) == len(self.fingerprints) == len(self.forest):
            raise ValueError("the tables of a length index have different lengths")

    @property
    def lengths(self) -> Ints:
        """[N] tokens of each example."""
        return self.forest.lengths

    def check(self, example: int, keys: Ints) -> None:
        """Raise UserError if an example, rendered now, has other tokens or pixels than when the index was made."""
        if fingerprint(keys) != int(self.fingerprints[example]):
            raise UserError(
                f"{self.sources[example]}: the example has changed since the length index was made (an image, if not "
                "the row itself): run `prefix-train plan` again"
            )


def fingerprint(keys: Ints) -> int:
    """64-bit hash of an example's keys."""
    content = np.ascontiguousarray(keys, "<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def build(
    config: Config,
    examples: Iterable[Rendered],
    skipped: Sequence[str] = (),
    data: Path | None = None,
    trie: Trie | None = None,
    cut: bool = False,
) -> LengthIndex:
    """The index of `examples`, rendered from `data` (`data.train` by default), each looked at once.

    trie: an empty one, to be filled with the examples' keys by who wants to look at them afterwards. cut: whether some
    were left out for being longer than `longest_accepted`; the index then holds for that length alone.
    """
    path = _data(config, data)
    stamp = _stamp(path)
    trie = Trie() if trie is None else trie
    sources: list[str] = []
    targets: list[int] = []
    fingerprints: list[int] = []
    for example in examples:
        trie.insert(example.keys)
        sources.append(example.source)
        targets.append(int(example.target.sum()))
        fingerprints.append(fingerprint(example.keys))
    if _stamp(path) != stamp:
        raise UserError(f"{path} changed while it was read: run `prefix-train plan` again")
    return LengthIndex(
        key=key_of(config, path, cut=cut),
        stamp=stamp,
        sources=tuple(sources),
        skipped=tuple(skipped),
        targets=np.array(targets, np.int64),
        fingerprints=np.array(fingerprints, np.uint64),
        forest=trie.forest(config.pack.min_shared),
    )


def longest_accepted(config: Config) -> int:
    """Most tokens of an example: `data.max_example_tokens`, where that is given, and never more than a pack holds."""
    return min(config.data.max_example_tokens or config.pack.max_positions, config.pack.max_positions)


def index_path(config: Config, data: Path | None = None, cut: bool = False) -> Path:
    """Where the index of a data file is kept: in `run_root/lengths`, named after the file and its place, and after the
    model and the options that it was made for. Paths count as submit resolves them. cut: see `build`."""
    path = Path(os.path.abspath(_data(config, data)))
    model = None if config.model.path is None else os.path.abspath(locate(config.model.path))
    made_for = json.dumps([model, config.model.build, _options(config, cut)], sort_keys=True)
    name = f"{path.stem}-{_sha256(str(path).encode())[:12]}-{_sha256(made_for.encode())[:8]}.npz"
    return Path(config.run_root) / "lengths" / name


def exists(config: Config, data: Path | None = None) -> bool:
    """Whether there is an index that `load` would look at."""
    return any(index_path(config, data, cut).exists() for cut in (False, True))


def write(path: Path, index: LengthIndex) -> None:
    """Write `index`, whole or not at all."""
    words = {"key": asdict(index.key), "stamp": index.stamp, "sources": index.sources, "skipped": index.skipped}
    arrays = {name: getattr(index.forest, name) for name in FOREST}
    arrays |= {"targets": index.targets, "fingerprints": index.fingerprints}
    arrays["words"] = np.frombuffer(json.dumps(words).encode(), np.uint8)
    runfolder.write_aside(path, lambda stream: np.savez(stream, **arrays))


def read(path: Path) -> LengthIndex:
    """The index in `path`, of whatever it was made. UserError where there is none, or the file is something else."""
    try:
        return _read(path)
    except FileNotFoundError as error:
        raise UserError(f"there is no length index at {path}: make it with `prefix-train plan CONFIG`") from error
    except UNREADABLE as error:
        raise UserError(
            f"{path} is not a length index ({error}): remove it and make it with `prefix-train plan CONFIG`"
        ) from error


def load(config: Config, data: Path | None = None) -> LengthIndex:
    """The index for `config` as it is now; UserError names what differs. No token is rendered, no torch imported.

    A data file of the same size and modification time is taken for unchanged; otherwise its bytes are hashed.
    """
    path, refused = _data(config, data), ""
    for cut in (True, False):
        place = index_path(config, data, cut)
        if not place.exists() and (cut or refused):
            continue
        index = read(place)
        if not (why := _unfit(index, config, path, cut)):
            return index
        refused = f"the length index {place} {why}"
    raise UserError(refused)


def _unfit(index: LengthIndex, config: Config, data: Path, cut: bool) -> str:
    """Why `index` is not that of `data` under `config` as both are now; empty where it is."""
    known = index.key.data if _stamp(data) == index.stamp else None
    now = key_of(config, data, known, cut)
    different = [field.name for field in fields(Key) if getattr(index.key, field.name) != getattr(now, field.name)]
    if different:
        what = ", ".join(f"{name} ({_short(index.key, name)} then, {_short(now, name)} now)" for name in different)
        return f"was made for something else: {what}: run `prefix-train plan` again"
    most, longest = longest_accepted(config), int(index.lengths.argmax())
    if (tokens := int(index.lengths[longest])) <= most:
        return ""
    return (
        f"has longer examples: {index.sources[longest]} has {tokens:,} tokens, and {most:,} are accepted: raise "
        "pack.max_positions and data.max_example_tokens, or run `prefix-train plan` again"
    )


def run_plan(config: Config, index: LengthIndex) -> RunPlan:
    """The plan of the run that `config` describes, over the examples of `index`."""
    return plan_training(config, index.forest, config.ranks, index.sources)


def largest_pack(config: Config, index: LengthIndex) -> Shape:
    """The shape of the first epoch's pack with the most positions, for the budget.

    rows: target tokens of its examples, so at least as many as the rows that go through the head.
    """
    pack = max(run_plan(config, index).epoch(0).packs, key=lambda pack: (pack.positions, pack.pairs))
    return Shape.of(pack.lengths, pack.parents, int(index.targets[list(pack.members)].sum()))


def key_of(config: Config, data: Path, data_sha256: str | None = None, cut: bool = False) -> Key:
    """The key of `data` under `config`. data_sha256: the file's hash, where it is known already. cut: see `build`."""
    here = Path(__file__).parent
    code = [here / f"{name}.py" for name in RENDERER]
    versions = [f"{name} {metadata.version(name)}" for name in ("transformers", "tokenizers")]
    model, template = _model_keys(config.model, here)
    return Key(
        data=data_sha256 or _data_sha256(data),
        model=model,
        template=template,
        renderer=_sha256(_files_sha256(code).encode(), *(version.encode() for version in versions)),
        options=_options(config, cut),
    )


def _options(config: Config, cut: bool) -> str:
    longest = f"{longest_accepted(config)}" if cut else "any"
    return (
        f"min_shared={config.pack.min_shared} longest={longest} on_bad_example={config.data.on_bad_example} "
        f"targets={config.data.targets}"
    )


def _model_keys(model: ModelConfig, here: Path) -> tuple[str, str]:
    if model.path is None:
        builder = [file for pattern in BUILDER for file in sorted(here.glob(pattern))]
        return _sha256(json.dumps(model.build, sort_keys=True).encode()), _files_sha256(builder)
    folder = locate(model.path)
    if is_gguf(folder):
        whole = _file_sha256(folder)  # weights, tokenizer and template are one file
        return whole, whole
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {folder} has no config.json; give a folder with a model in transformers' format")
    found = {file for pattern in PROCESSOR_FILES for file in folder.glob(pattern)}
    found = {file for file in found if not any(file.match(pattern) for pattern in NOT_PROCESSOR)}
    return _file_sha256(folder / "config.json"), _files_sha256(sorted(found))


def _data(config: Config, data: Path | None) -> Path:
    return Path(config.data.train) if data is None else data


def _stamp(path: Path) -> tuple[int, int]:
    """Size and modification time of a data file; of several the sum and the last, with their folders' for renaming."""
    try:
        files = _files_of(path)
        folders = {folder for file in files for folder in file.parents if folder.is_relative_to(path)}
        found, around = [file.stat() for file in files], [folder.stat() for folder in folders]
    except OSError as error:
        raise UserError(f"{path}: the data file cannot be read ({error.strerror})") from error
    last = max((status.st_mtime_ns for status in (*found, *around)), default=0)
    return sum(status.st_size for status in found), last


def _data_sha256(path: Path) -> str:
    if not path.is_dir():
        return _file_sha256(path)
    files = _files_of(path)
    return _sha256(*(part.encode() for file in files for part in (str(file.relative_to(path)), _file_sha256(file))))


def _files_of(path: Path) -> list[Path]:
    """The files that the rows of `path` are in; itself, where it is a file."""
    return tables.files_of(path) if not path.is_dir() or tables.is_table(path) else prompts.files_of(path)


def _short(key: Key, name: str) -> str:
    value: str = getattr(key, name)
    return value if name == "options" else value[:12]


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files_sha256(paths: Sequence[Path]) -> str:
    """Hash of names and contents."""
    return _sha256(*(part.encode() for path in paths for part in (path.name, _file_sha256(path))))


def _read(path: Path) -> LengthIndex:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        words: dict[str, Any] = json.loads(arrays["words"].tobytes())
        tables = {name: _ints(arrays[name], np.int64) for name in (*FOREST, "targets")}
        size, modified = words["stamp"]
        return LengthIndex(
            key=Key(**{field.name: str(words["key"][field.name]) for field in fields(Key)}),
            stamp=(int(size), int(modified)),
            sources=tuple(map(str, words["sources"])),
            skipped=tuple(map(str, words["skipped"])),
            targets=tables["targets"],
            fingerprints=_ints(arrays["fingerprints"], np.uint64),
            forest=Forest(*(tables[name] for name in FOREST)),
        )


def _ints(array: NDArray[Any], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"a table of shape {array.shape} and type {array.dtype}, not a row of {dtype.__name__}")
    return array
