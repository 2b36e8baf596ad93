"""Safetensors files that are written a tensor at a time, split and indexed as transformers does it.

The library writes a file from tensors that are all in memory. The format does not ask for that: it is a head that says
where each tensor lies, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from configs import runfolder
from configs.wording import counted
from prefix_train.stream.build import as_bytes
from prefix_train.tensors import TensorError, sync

INDEX = "model.safetensors.index.json"
PATTERN = "model{suffix}.safetensors"
TYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
"""The dtypes that are written, by safetensors' names."""

ALIGNMENT = 8
"""A head ends at a multiple of so many bytes."""


class Shards:
    """The weight files of a model folder, whose tensors come in any order.

    planned: every tensor by the name it is stored under, on the meta device; shapes and dtypes are taken from it.
    shard_bytes: most bytes of tensors in one file; a larger tensor has a file of its own. The files take their whole
    room at once, so that a disk which cannot hold them says so before the first tensor.
    """

    def __init__(self, folder: Path, planned: Mapping[str, Tensor], shard_bytes: int) -> None:
        self.folder = folder
        self.planned = {
            name: torch.empty(like.shape, dtype=like.dtype, device="meta") for name, like in planned.items()
        }
        split = split_torch_state_dict_into_shards(self.planned, filename_pattern=PATTERN, max_shard_size=shard_bytes)
        self.file_of: dict[str, str] = split.tensor_to_filename
        self._place: dict[str, int] = {}
        self._left = set(self.planned)
        for file, names in split.filename_to_tensors.items():
            self._begin(file, names)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(like.numel() for like in self.planned.values())

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, once. Raises TensorError where it is not planned so."""
        like = self.planned.get(name)
        if like is None or name not in self._left or (like.shape, like.dtype) != (tensor.shape, tensor.dtype):
            planned = "is not planned" if like is None else f"is planned once, {like.dtype} {tuple(like.shape)}"
            raise TensorError(f"{self.folder}: {name}, {tensor.dtype} {tuple(tensor.shape)}, {planned}")
        self._left.remove(name)
        with (self.folder / self.file_of[name]).open("r+b") as file:
            file.seek(self._place[name])
            file.write(as_bytes(tensor))

    def finish(self) -> None:
        """Write the index, where there are several files; wait for the disk. TensorError if a tensor is left."""
        if self._left:
            raise TensorError(
                f"{self.folder}: {counted(len(self._left), 'tensor')} not written, {min(self._left)} is one"
            )
        files = set(self.file_of.values())
        if len(files) > 1:
            size = sum(_size(like) for like in self.planned.values())
            totals = {"total_parameters": self.parameters, "total_size": size}
            index = {"metadata": totals, "weight_map": self.file_of}
            runfolder.write_text(self.folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        for file in files:
            sync(self.folder / file)

    def _begin(self, file: str, names: list[str]) -> None:
        """Make a file of its whole size, with its head."""
        head: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(names, key=lambda name: (-self.planned[name].dtype.itemsize, name)):
            like, start = self.planned[name], end
            end += _size(like)
            head[name] = {"dtype": TYPES[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
            self._place[name] = start
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        for name in names:
            self._place[name] += 8 + len(text)
        with (self.folder / file).open("xb") as stream:
            os.posix_fallocate(stream.fileno(), 0, 8 + len(text) + end)
            stream.write(len(text).to_bytes(8, "little") + text)


def _size(like: Tensor) -> int:
    return prod(like.shape) * like.dtype.itemsize
