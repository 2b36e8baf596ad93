"""Makes a store: one file after the other, one tensor after the other, so that no model is ever in memory whole.

A build that was killed goes on where it was: a file gets its name when it is complete. What an unfinished store is
made of stands in `building.json`, which goes when the manifest has come.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs import runfolder
from configs.errors import UserError
from prefix_train.stream import manifest as manifests
from prefix_train.stream import places, sources
from prefix_train.stream.manifest import HEADER, BlockFile, Manifest, PartSpec
from prefix_train.stream.places import Choice, Parts
from prefix_train.stream.sources import Source
from prefix_train.stream.store import Store

BUILDING, LOCK = "building.json", "building.lock"

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "files may not be as large",
}

Progress = Callable[[BlockFile, bool], None]
"""Is told of each file of the store that is there, and whether it was there before."""


def from_model(model: PreTrainedModel, folder: Path, choice: Choice) -> Store:
    """A store of a model that is in memory. Raises UserError as `build` does."""
    return build(sources.of_model(model, {"kind": "memory"}), folder, choice)


def build(source: Source, folder: Path, choice: Choice, progress: Progress = lambda block, before: None) -> Store:
    """The store of `source` in `folder`, which is new, or holds this very store, finished or not.

    Raises UserError where it holds anything else, another process builds it, or the disk cannot hold it.
    """
    blocks = places.place(source.model, choice)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"no store can be made in {folder}: {error.strerror}: give another --out") from error
    planned = Manifest(
        manifests.FORMAT,
        json.loads(source.model.config.to_json_string(use_diff=False)),
        choice.dtype,
        choice.weights,
        choice.double_quant,
        places.tied(source.model) is not None,
        json.loads(json.dumps(source.identity)),
        source.notes,
        blocks,
    )
    if (folder / manifests.NAME).exists():
        return _finished(folder, planned)
    with _unfinished(folder, planned, source.stamp):
        written = _write_blocks(folder, blocks, source, progress)
        made = manifests.encode(replace(planned, blocks=written))
        with _room(folder, manifests.NAME, len(made)):
            runfolder.write_aside(folder / manifests.NAME, lambda stream: stream.write(made))
    return Store.open(folder)


def _finished(folder: Path, planned: Manifest) -> Store:
    """The store that is in `folder` already. UserError unless it is the planned one."""
    store = Store.open(folder)
    if _without_hashes(store.manifest) != planned:
        raise UserError(f"{folder} is a store of another model or in another form: remove it, or give another folder")
    _tidy(folder)
    return store


def _tidy(folder: Path) -> None:
    """Remove what only an unfinished store needs; where it lies on a disk that is read-only now it does no harm."""
    for name in (BUILDING, LOCK):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise


def _without_hashes(manifest: Manifest) -> Manifest:
    def bare(block: BlockFile) -> BlockFile:
        tensors = (
            replace(stored, parts={name: replace(part, sha256="") for name, part in stored.parts.items()})
            for stored in block.tensors
        )
        return replace(block, sha256="", tensors=tuple(tensors))

    return replace(manifest, sha256="", blocks=tuple(bare(block) for block in manifest.blocks))


@contextmanager
def _unfinished(folder: Path, planned: Manifest, stamp: tuple[Any, ...]) -> Iterator[None]:
    """Holds `folder` for this build alone, and says in it what is built there until that is finished."""
    note, lock = folder / BUILDING, folder / LOCK
    with _opened(lock) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: another process is building a store there: wait for it, or end it") from error
        except OSError as error:
            raise UserError(f"{lock} cannot be locked: {error.strerror}: give another --out") from error
        text = json.dumps({"manifest": json.loads(manifests.encode(planned)), "stamp": stamp})
        if not note.exists():
            if found := sorted(path.name for path in folder.iterdir() if path != lock and path.name[0] != "."):
                lock.unlink()
                raise UserError(f"{folder} holds {found[0]} and is no store: give a new folder")
            with _room(folder, note.name, len(text)):
                runfolder.write_text(note, text)
        elif note.read_bytes() != text.encode():
            raise UserError(
                f"{folder} holds an unfinished store of another model or in another form, or the model's files have "
                "changed since: remove it, or give another folder"
            )
        for stray in folder.glob(".*.tmp"):
            stray.unlink()  # what a killed build was writing
        yield
        _tidy(folder)


def _opened(lock: Path) -> TextIO:
    try:
        return lock.open("a")
    except OSError as error:
        raise UserError(f"no store can be made in {lock.parent}: {error.strerror}: give another --out") from error


def _write_blocks(
    folder: Path, blocks: tuple[BlockFile, ...], source: Source, progress: Progress
) -> tuple[BlockFile, ...]:
    there = {block.name: found for block in blocks if (found := _complete(folder, block)) is not None}
    needed = sum(block.nbytes for block in blocks if block.name not in there)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{folder}: the store needs {needed:,} bytes more, and {free:,} are free on its disk")
    write = partial(_write_block, folder, parts_of=source.parts)
    missing = [block for block in blocks if block.name not in there]
    written = _in_order(write, missing, source.workers)
    made = []
    for block in blocks:
        made.append(there[block.name] if block.name in there else next(written))
        progress(made[-1], block.name in there)
    return tuple(made)


def _in_order(write: Callable[[BlockFile], BlockFile], blocks: list[BlockFile], workers: int) -> Iterator[BlockFile]:
    if workers == 1:
        yield from map(write, blocks)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(write, blocks)
    finally:
        pool.shutdown(cancel_futures=True)


def _complete(folder: Path, block: BlockFile) -> BlockFile | None:
    """`block` with its hashes, if its file is there, can be read and is whole by what its header says; none if not."""
    path = folder / block.file
    try:
        if path.stat().st_size != block.nbytes:
            return None
        with path.open("rb") as file:
            found = _hashed(block, lambda part: _digest(file, part))
            file.seek(0)
            return found if file.read(HEADER) == manifests.header(found.sha256) else None
    except OSError:
        return None  # it is written anew


def _digest(file: BinaryIO, part: PartSpec) -> str:
    file.seek(part.offset)
    found, left = hashlib.sha256(), part.nbytes
    while piece := file.read(min(left, 1 << 24)):
        found.update(piece)
        left -= len(piece)
    return found.hexdigest()


def _hashed(block: BlockFile, digest: Callable[[PartSpec], str]) -> BlockFile:
    """`block` with the hash that `digest` gives for each part, which it is asked for in their order."""
    tensors = tuple(
        replace(stored, parts={name: replace(part, sha256=digest(part)) for name, part in stored.parts.items()})
        for stored in block.tensors
    )
    whole = replace(block, tensors=tensors)
    return replace(whole, sha256=manifests.block_hash(part for _, _, part in whole.parts))


def _write_block(folder: Path, block: BlockFile, parts_of: Parts) -> BlockFile:
    """Write the file of `block` aside and give it its name; returns the block with its hashes."""
    made: list[BlockFile] = []
    with _room(folder, block.name, block.nbytes):
        runfolder.write_aside(folder / block.file, lambda file: made.append(_fill(file, block, parts_of)))
    return made[0]


def _fill(file: BinaryIO, block: BlockFile, parts_of: Parts) -> BlockFile:
    file.write(bytes(HEADER))
    digests = {}
    for stored in block.tensors:
        values = parts_of(block, stored)
        for name, part in stored.parts.items():
            if (values[name].dtype, tuple(values[name].shape)) != (part.dtype, part.shape):
                raise AssertionError(f"{block.name}: {stored.name}: {name} is not what was planned")
            data = as_bytes(values[name])
            file.write(bytes(part.offset - file.tell()))
            file.write(data)
            digests[part.offset] = hashlib.sha256(data).hexdigest()
    file.write(bytes(block.nbytes - file.tell()))
    hashed = _hashed(block, lambda part: digests[part.offset])
    file.seek(0)
    file.write(manifests.header(hashed.sha256))
    return hashed


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes as they are: never read through a float type, which may rewrite a NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


@contextmanager
def _room(folder: Path, what: str, nbytes: int) -> Iterator[None]:
    """Turns what the disk refuses into one line; a full one's says what did not fit. What was being written is gone,
    the rest is kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise UserError(f"{error.filename or folder / what}: {error.strerror}, while {what} was written") from error
        free = shutil.disk_usage(folder).free
        raise UserError(
            f"{folder}: {FULL[error.errno]}: {what} has {nbytes:,} bytes, {free:,} are free ({error.strerror}); "
            "make room and run the same command again: finished files are kept"
        ) from error
