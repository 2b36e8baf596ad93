"""What a store holds, as one JSON file: every tensor with its place, and where it all came from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from configs.errors import UserError
from prefix_train.stream import origin

NAME = "manifest.json"
FORMAT = origin.FORMAT
ALIGNMENT = 64
"""Every part begins at a multiple of this many bytes, and every file is that long: vectorised kernels need it."""

MAGIC = b"prefix-train/1\0\0"
HEADER = 64
"""A file begins with MAGIC and the block's hash: so another store's file is known at sight."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8}

Weights = Literal["plain", "nf4"]


@dataclass(frozen=True)
class PartSpec:
    """Where a part lies: bytes `offset` to `offset + nbytes` of its file, `dtype` and `shape` once they are read."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str = ""
    """Of these bytes; empty before they are written."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a block. shape, dtype: as the model has it.

    parts: `data` of a plain tensor; `packed` and `absmax` of an NF4 one, with double quantisation also `absmax2`,
    `code2` and `offset` (see `nf4.Parts`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weights: Weights
    parts: dict[str, PartSpec]

    @property
    def elements(self) -> int:
        """Elements of the tensor as the model has it."""
        return prod(self.shape)


@dataclass(frozen=True)
class BlockFile:
    """One file of the store: the tensors below one module of the model.

    name: `embedding`, `block.0` and on, `final_norm`, `head` (not where it is tied to the embedding), `vision`.
    module: the module's name in the model; `<module>.<tensor's name>` is the parameter's. sha256: of its parts'
    hashes, one after the other; the header repeats it. The bytes between the parts are zeros.
    """

    name: str
    module: str
    nbytes: int
    sha256: str
    tensors: tuple[Stored, ...]

    @property
    def parts(self) -> Iterator[tuple[Stored, str, PartSpec]]:
        """All parts of all tensors, as they lie in the file, each with its tensor and its name."""
        for stored in self.tensors:
            for name, part in stored.parts.items():
                yield stored, name, part

    @property
    def file(self) -> str:
        """The file's name in the store."""
        return f"{self.name}.bin"

    @cached_property
    def by_name(self) -> dict[str, Stored]:
        """The tensors by name."""
        return {stored.name: stored for stored in self.tensors}


@dataclass(frozen=True)
class Manifest:
    """All that a store says about itself.

    config: the model's transformers configuration. dtype: of every tensor once it is read. source: where the weights
    came from. notes: what a reader must know, such as weights that are random. sha256: of the manifest without it.
    """

    format: int
    config: dict[str, Any]
    dtype: torch.dtype
    weights: Weights
    double_quant: bool
    tied: bool
    source: dict[str, Any]
    notes: tuple[str, ...]
    blocks: tuple[BlockFile, ...]
    sha256: str = ""


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, its hash filled in."""
    body = _json(replace(manifest, sha256=""))
    return _json(replace(manifest, sha256=hashlib.sha256(body).hexdigest()))


def read(folder: Path) -> Manifest:
    """The manifest of the store in `folder`. UserError where there is none, or where it is damaged or not ours."""
    path = folder / NAME
    try:
        data = path.read_bytes()
        origin.require_format(path, msgspec.json.decode(data, type=dict)["format"])  # before its fields are looked at
        manifest = msgspec.json.decode(data, type=Manifest, dec_hook=_decode)
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no store: there is no {NAME}; make one with prefix-train stream build") from error
    except KeyError as error:
        raise UserError(f"{path} cannot be read as a store's manifest: it has no {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a store's manifest: {error}") from error
    found = hashlib.sha256(_json(replace(manifest, sha256=""))).hexdigest()
    if found != manifest.sha256:
        raise UserError(f"{path} was changed: sha256 {manifest.sha256} expected, {found} found; build the store again")
    for block in manifest.blocks:
        _check_places(path, block)
    return manifest


def block_hash(parts: Iterable[PartSpec]) -> str:
    """Hash of a block from its parts' hashes."""
    return hashlib.sha256(b"".join(bytes.fromhex(part.sha256) for part in parts)).hexdigest()


def header(sha256: str) -> bytes:
    """The first bytes of a block's file."""
    return (MAGIC + bytes.fromhex(sha256)).ljust(HEADER, b"\0")


def aligned(nbytes: int) -> int:
    """`nbytes` and the padding behind it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_places(path: Path, block: BlockFile) -> None:
    """Raise UserError where a part is not aligned, overlaps another, or does not fit its file or shape."""
    if re.fullmatch(r"[a-z_]+(\.\d+)?", block.name) is None:
        raise UserError(f"{path}: {block.name!r} is no block's name")
    end = HEADER
    for stored, name, part in block.parts:
        fits = part.nbytes == prod(part.shape) * part.dtype.itemsize and part.offset == aligned(end)
        end = part.offset + part.nbytes
        if not fits or end > block.nbytes:
            raise UserError(f"{path}: {block.name}: {stored.name}: {name} at offset {part.offset} has no place")


def _json(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest, enc_hook=_encode), indent=1) + b"\n"


def _encode(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise NotImplementedError(f"{type(value).__name__} in a manifest")


def _decode(kind: type, value: Any) -> Any:
    if kind is torch.dtype and value in DTYPES:
        return DTYPES[value]
    raise ValueError(f"{value!r} is no {kind.__name__} that a store holds")
