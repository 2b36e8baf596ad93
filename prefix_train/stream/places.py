"""Which tensor of a model lies where in a store: known from the model's shape alone, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.errors import UserError
from prefix_train import anatomy
from prefix_train.stream import nf4
from prefix_train.stream.manifest import HEADER, BlockFile, PartSpec, Stored, Weights, aligned

Parts = Callable[[BlockFile, Stored], nf4.Parts]
"""Gives the parts of one tensor of one file, dtypes and shapes as its `Stored` says."""


@dataclass(frozen=True)
class Choice:
    """How weights are stored. dtype: of tensors once they are read. double_quant: also the scales in 8 bits."""

    weights: Weights
    dtype: torch.dtype
    double_quant: bool = False


def place(model: PreTrainedModel, choice: Choice) -> tuple[BlockFile, ...]:
    """The files of a store for `model`, which may be on the meta device, in the order of the forward pass; no hashes.

    Raises UserError for a parameter or buffer that belongs to no file.
    """
    left = set(model.state_dict()) - set((tied(model) or ("", ""))[1:])
    blocks = []
    for name, module in _modules(model).items():
        tensors = dict(module.state_dict())
        prefix = anatomy.name_of(module, model)
        if model.dtype != choice.dtype:  # else a tensor that transformers keeps in float32 is kept so
            tensors = {own: value.to(device="meta", dtype=choice.dtype) for own, value in tensors.items()}
        linear = _linears(module) if name.startswith("block.") else set()
        blocks.append(_file(name, prefix, tensors, linear, choice))
        left -= {f"{prefix}.{tensor}" for tensor in tensors}
    if left:
        raise UserError(f"{type(model).__name__}: {min(left)} belongs to no part that can be streamed")
    return tuple(blocks)


def tied(model: PreTrainedModel) -> tuple[str, str] | None:
    """The embedding's and the head's weight by name, where the two are one; none where they are not."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        return None
    return f"{anatomy.name_of(embedding, model)}.weight", f"{anatomy.name_of(head, model)}.weight"


def _modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that become files, by the files' names."""
    found = anatomy.find(model)
    vision = {"vision": found.vision} if found.vision is not None else {}
    layers = {f"block.{index}": layer for index, layer in enumerate(found.layers)}
    head = {} if tied(model) else {"head": found.head}
    return {"embedding": model.get_input_embeddings(), **vision, **layers, "final_norm": found.decoder.norm, **head}


def _linears(layer: nn.Module) -> set[str]:
    return {f"{name}.weight" for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


def _file(name: str, module: str, tensors: dict[str, Tensor], linear: set[str], choice: Choice) -> BlockFile:
    end, stored = HEADER, []
    for tensor, value in tensors.items():
        shape = tuple(value.shape)
        nf4_here = choice.weights == "nf4" and tensor in linear
        shapes = nf4.part_shapes(shape, choice.double_quant) if nf4_here else {"data": (value.dtype, shape)}
        parts = {}
        for part, (dtype, part_shape) in shapes.items():
            offset = aligned(end)
            parts[part] = PartSpec(offset, prod(part_shape) * dtype.itemsize, dtype, part_shape)
            end = offset + parts[part].nbytes
        stored.append(Stored(tensor, shape, value.dtype, "nf4" if nf4_here else "plain", parts))
    return BlockFile(name, module, aligned(end), "", tuple(stored))


def parts_of_weight(read: Callable[[str], Tensor]) -> Parts:
    """The parts of the weights that `read` gives by the parameter's name. UserError for what cannot be stored."""

    def parts(block: BlockFile, stored: Stored) -> nf4.Parts:
        name = f"{block.module}.{stored.name}"
        weight = read(name).detach()
        if tuple(weight.shape) != stored.shape:
            raise UserError(f"{name}: shape {list(stored.shape)} expected, {list(weight.shape)} found")
        weight = weight.to(stored.dtype)
        if stored.weights == "plain":
            return {"data": weight}
        try:
            return nf4.quantise(weight, "offset" in stored.parts)
        except ValueError as error:
            raise UserError(f"{name} cannot be stored in NF4: {error}") from error

    return parts
