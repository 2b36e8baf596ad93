"""Which model a store was made of, told from its manifest and the model's files alone. No torch: submit asks this."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.modelpath import is_gguf, locate
from configs.schema import Config, ModelConfig
from prefix_train.geometry import Geometry, read_config

MANIFEST = "manifest.json"

FORMAT = 1
"""Of the manifest, and of the files that it names."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What reading a damaged or foreign manifest, and the sizes of the model in it, may raise."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

SAMPLES, SAMPLE = 64, 4096
"""So many pieces of a file, each so many bytes, stand for its contents in a fingerprint."""


def require(config: Config) -> None:
    """Raise UserError unless `stream.store` is there, has all its files, and was made of the model of `config`.

    What its bytes are is not looked at: the run does that.
    """
    assert config.stream.store is not None
    folder, build = Path(config.stream.store), f"prefix-train stream build --model CONFIG --out {config.stream.store}"
    if not (folder / MANIFEST).is_file():
        raise UserError(f"stream.store: {folder} is no store: it has no {MANIFEST}; make one with `{build}`")
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        written = manifest["format"]
    except UNREADABLE as error:
        raise UserError(f"{path} cannot be read as a store's manifest: {error!r}; build the store again") from error
    require_format(path, written)
    try:
        sizes = {f"{block['name']}.bin": int(block["nbytes"]) for block in manifest["blocks"]}
        source, dtype = dict(manifest["source"]), str(manifest["dtype"])
        theirs = _sizes(Geometry.of(dict(manifest["config"])))
        if not isinstance(source["kind"], str):
            raise UserError(f"source.kind is {source['kind']!r}: text is expected")
    except UserError as error:
        raise UserError(f"{path}: {error}; build the store again") from error
    except UNREADABLE as error:
        raise UserError(f"{path} cannot be read as a store's manifest: {error!r}; build the store again") from error
    if dtype != config.model.dtype:
        raise UserError(
            f"{folder} is read in {dtype}: set model.dtype={dtype}, or build a store for {config.model.dtype}"
        )
    ours = _sizes(Geometry.of(read_config(config.model)))
    if differ := [name for name in ours if ours[name] != theirs[name]]:
        raise UserError(f"{folder} was made of another model: {', '.join(differ)} differ from those of the run's model")
    if has_weights(config.model):
        require_same(folder, source, config.model)
    for name, nbytes in sizes.items():
        found = os.path.getsize(folder / name) if (folder / name).is_file() else None
        if found != nbytes:
            told = "is not there" if found is None else f"has {found:,} bytes"
            raise UserError(f"{folder / name} {told}, {nbytes:,} are expected; remove the store and build it again")


def require_format(path: Path, written: Any) -> None:
    """Raise UserError unless `written`, the format that the manifest at `path` names, is the one that is read here."""
    if written == FORMAT:
        return
    newer = isinstance(written, int) and written > FORMAT
    told = " (one of a newer version: update this program to use it)" if newer else ""
    raise UserError(f"{path}: format {written!r}, and {FORMAT} is expected{told}; build the store again")


def has_weights(config: ModelConfig) -> bool:
    """Is there anything that a store's weights can be compared with? A folder may hold a configuration alone."""
    return config.path is None or not locate(config.path).is_dir() or any(locate(config.path).glob("*.safetensors"))


def require_same(folder: Path, source: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise UserError unless the store in `folder` was made of the weights that `config` names; of random ones, for its
    model. source: what its manifest says of where they came from.

    A store of a model that was in memory says only what its configuration was.
    """
    wanted = json.loads(json.dumps(identify(config)))
    keys = {"memory": (), "random": ("build",), "build": ("build", "seed")}.get(source["kind"], ("fingerprint",))
    if any(source.get(key) != wanted.get(key) for key in keys):
        which = config.path or "model.build"
        made_of = source.get("path") or f"a model of kind {source['kind']}"
        raise UserError(f"{folder} was made of {made_of}, whose weights are not those of {which}")


def identify(config: ModelConfig) -> dict[str, Any]:
    """Which weights a run with `config` would load, told without loading them."""
    if config.path is None:
        return {"kind": "build", "build": dict(config.build), "seed": config.seed}
    path = locate(config.path)
    identity = {"kind": "gguf" if is_gguf(path) else "safetensors", "path": config.path, "revision": _revision(path)}
    return identity | {"fingerprint": fingerprint(files_of(config))}


def files_of(config: ModelConfig) -> list[Path]:
    """The files that hold the weights of `model.path`. UserError where one is missing."""
    path = locate(config.path or "")
    return [path] if is_gguf(path) else _shards(path)


def fingerprint(files: Iterable[Path]) -> str:
    """Hash of the files' names, sizes and 64 pieces of each: tells models apart without reading all of them."""
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in range(SAMPLES):
                file.seek(max(size - SAMPLE, 0) * piece // (SAMPLES - 1))
                found.update(file.read(SAMPLE))
    return found.hexdigest()


def _sizes(geometry: Geometry) -> dict[str, Any]:
    """What two models that are one have in common, by the names of transformers' options where there are some."""
    return {
        "num_hidden_layers": geometry.layers,
        "hidden_size": geometry.hidden,
        "vocab_size": geometry.vocabulary,
        "layer_types": geometry.layer_types,
        "linear modules": [geometry.linears(layer) for layer in range(geometry.layers)],
        "numbers of parameters": geometry.parameters,
    }


def _revision(path: Path) -> str | None:
    """The commit that a folder of the hub's cache names: `snapshots/<commit>`."""
    folder = path.parent if path.is_file() else path
    return folder.name if folder.parent.name == "snapshots" else None


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a model folder."""
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        names = {SINGLE}
    else:
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} cannot be read as an index of shards: {error!r}") from error
    paths = [folder / name for name in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} does not exist: {folder} is no complete model in safetensors format")
    return paths
