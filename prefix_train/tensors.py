"""Named tensors: gathered from shards, sharded again, hashed, read strictly, compared by name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")

RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How a message of Rust's ends that passes on an error of the system: its errno."""


class TensorError(RuntimeError):
    """Tensors that are not those that were asked for: which file, which names, what instead."""


def read_tensors(path: Path, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a safetensors file, one at a time, in the order of `wanted`, on the CPU.

    Raises TensorError where the file's names or shapes (before the first tensor) or dtypes are not those of `wanted`.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            check_names(str(path), stored.keys(), wanted)
            check_shapes(str(path), stored, wanted)
            for name, tensor in wanted.items():
                whole = stored.get_tensor(name)
                if whole.dtype != tensor.dtype:
                    raise TensorError(f"{path}: {name} is {whole.dtype}, the model's is {tensor.dtype}")
                yield name, whole
    except SafetensorError as error:
        raise TensorError(f"{path}: {error}") from error


def check_names(where: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise TensorError with what is missing and what is unexpected, unless both hold the same names."""
    have, want = set(found), set(wanted)
    if have != want:
        raise TensorError(
            f"{where} does not hold exactly the {len(want)} trained tensors: "
            f"missing {_some(want - have)}, unexpected {_some(have - want)}"
        )


def check_shapes(where: str, stored: Any, wanted: Mapping[str, Tensor]) -> None:
    """Raise TensorError unless the open safetensors file `stored` has the shapes of `wanted`."""
    for name, tensor in wanted.items():
        shape = tuple(stored.get_slice(name).get_shape())
        if shape != tuple(tensor.shape):
            raise TensorError(f"{where}: {name} has shape {shape}, the model's has {tuple(tensor.shape)}")


def check_plain(names: Iterable[str]) -> None:
    """Raise TensorError for a parameter inside a wrapped module: PEFT finds tensors by module name and drops it."""
    for name in names:
        if wrapper := next((wrapper for wrapper in WRAPPERS if wrapper in name), None):
            raise TensorError(f"{name}: a wrapped module ({wrapper}) hides its parameters from PEFT; wrap none")


def full_tensors(named: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Full copies of sharded or plain tensors, on the CPU; nothing where `keep` is not set. Every rank calls it."""
    gathered = {}
    for name, tensor in named.items():
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if keep:
            gathered[name] = whole.to("cpu", copy=True).contiguous()
    return gathered


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, whatever their order."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; sharded parameters share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, placed as `like` is; no rank waits for another."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and wait until it is on the disk. Raises OSError where that fails."""
    with disk_errors():
        save_file(dict(tensors), path)
    sync(path)


@contextmanager
def disk_errors() -> Iterator[None]:
    """What the disk refuses to safetensors or tokenizers in the block is an OSError.

    They are written in Rust: safetensors raises an exception of its own, tokenizers a plain Exception, and only the
    message has the system's error.
    """
    try:
        yield
    except Exception as error:
        found = RUST_OS_ERROR.search(str(error))
        if found is None or type(error) not in (SafetensorError, Exception):
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def _some(names: Iterable[str], shown: int = 3) -> str:
    ordered = sorted(names)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > shown else ""
    return ", ".join(ordered[:shown]) + more if ordered else "none"
