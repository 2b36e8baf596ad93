"""Makes a store: one file after the other, one tensor after the other, so that no model is ever in memory whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs import runfolder
from prefix_train.stream import manifest as manifests
from prefix_train.stream import nf4, places
from prefix_train.stream.manifest import HEADER, BlockFile, Manifest, Stored
from prefix_train.stream.places import Choice
from prefix_train.stream.store import Store, header

Read = Callable[[str], Tensor]
"""A parameter's weight, by its full name in the model."""


def from_model(model: PreTrainedModel, folder: Path, choice: Choice) -> Store:
    """A store of a model that is in memory. Raises UserError as `build` does."""
    state = model.state_dict()
    return write(model, state.__getitem__, folder, choice, {"kind": "memory"})


def write(
    model: PreTrainedModel,
    read: Read,
    folder: Path,
    choice: Choice,
    source: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> Store:
    """The store of `model`, which may be on the meta device, with the weights that `read` gives."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = tuple(_write_block(folder, block, read) for block in places.place(model, choice))
    made = Manifest(
        manifests.FORMAT,
        model.config.to_dict(),
        choice.dtype,
        choice.weights,
        choice.double_quant,
        places.is_tied(model),
        source,
        notes,
        blocks,
    )
    runfolder.write_aside(folder / manifests.NAME, lambda stream: stream.write(manifests.encode(made)))
    return Store.open(folder)


def _write_block(folder: Path, block: BlockFile, read: Read) -> BlockFile:
    whole, tensors = hashlib.sha256(), []
    path = folder / block.file
    with path.open("wb") as file:
        file.write(bytes(HEADER))
        for stored in block.tensors:
            parts = {}
            for name, value in _parts(stored, read(f"{block.module}.{stored.name}"), block).items():
                part = stored.parts[name]
                padding, data = bytes(part.offset - file.tell()), as_bytes(value)
                for piece in (padding, data):
                    file.write(piece)
                    whole.update(piece)
                parts[name] = replace(part, sha256=hashlib.sha256(data).hexdigest())
            tensors.append(replace(stored, parts=parts))
        padding = bytes(block.nbytes - file.tell())
        file.write(padding)
        whole.update(padding)
        file.seek(0)
        file.write(header(whole.hexdigest()))
    return replace(block, sha256=whole.hexdigest(), tensors=tuple(tensors))


def _parts(stored: Stored, weight: Tensor, block: BlockFile) -> dict[str, Tensor]:
    weight = weight.detach().to(stored.dtype)
    if stored.weights == "plain":
        return {"data": weight}
    return nf4.quantise(weight, "offset" in stored.parts)


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, untouched: never read through a float type, which may rewrite a NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
