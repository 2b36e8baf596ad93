"""Random weights for a store of any size, for measurements: made about as fast as written, the same from a seed."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema import ModelConfig
from prefix_train import model
from prefix_train.stream import nf4, places
from prefix_train.stream.manifest import BlockFile, PartSpec, Stored
from prefix_train.stream.places import Choice
from prefix_train.stream.sources import Source

SCALE = 0.036
"""Largest magnitude of a group of 64 weights: codes drawn evenly then have about transformers' deviation of 0.02."""

DEVIATION = 0.02
"""Of plain weights."""

SMALL = 1 << 20
"""Elements up to which what is no matrix is initialised by transformers itself: norms, convolutions, time steps."""

SHIFT = 64
"""Bytes, or elements, between the beginnings of two tensors in the sequence that they share."""

NOTES = (
    "random weights: they say nothing, and measure only how fast a store is read and computed with",
    "the matrices of all blocks are pieces of one random sequence that begin at different places",
)


def generate(config: ModelConfig, choice: Choice, seed: int) -> Source:
    """Random weights for the model of `config.build`; its embedding, head and norms as transformers draws them."""
    skeleton = model.skeleton(config)
    blocks = places.place(skeleton, choice)
    tensors = [(block.name, stored) for block in blocks for stored in block.tensors]
    turn = {(block, stored.name): index for index, (block, stored) in enumerate(tensors)}
    longest = max(stored.elements for block, stored in tensors if block.startswith("block."))
    pool, small = _Pool(longest, SHIFT * len(tensors), seed), _small(model.skeleton(config), seed)

    def parts(block: BlockFile, stored: Stored) -> nf4.Parts:
        begin = turn[block.name, stored.name] * SHIFT
        if stored.weights == "nf4":
            return {name: pool.part(name, part, begin) for name, part in stored.parts.items()}
        if (name := f"{block.module}.{stored.name}") in small:
            return {"data": small[name].to(stored.dtype)}
        if block.name.startswith("block."):
            return {"data": pool.normal(stored.dtype)[begin:][: stored.elements].view(stored.shape)}
        draw = torch.Generator().manual_seed(seed + begin + 1)
        return {"data": torch.empty(stored.shape, dtype=stored.dtype).normal_(0, DEVIATION, generator=draw)}

    if choice.weights == "plain":
        pool.normal(choice.dtype)  # before the threads ask for it
    identity = {"kind": "random", "build": dict(config.build), "seed": seed}
    return Source(skeleton, parts, identity, notes=NOTES, workers=min(8, os.cpu_count() or 1))


class _Pool:
    """Sequences that are long enough for a tensor of `longest` elements that begins `shift` elements after their own
    beginning."""

    def __init__(self, longest: int, shift: int, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.length = longest + shift
        self.packed = torch.randint(0, 256, (longest // 2 + 1 + shift,), dtype=torch.uint8, generator=self.draw)
        scales = torch.rand(longest // nf4.BLOCK + 1 + shift, generator=self.draw)
        self.scales = scales.mul_(0.5).add_(0.75).mul_(SCALE)
        self.normals: dict[torch.dtype, Tensor] = {}

    def part(self, name: str, part: PartSpec, begin: int) -> Tensor:
        """One part of an NF4 tensor whose sequences begin at `begin`."""
        if name == "code2":
            return nf4.codes8()
        if name in ("absmax2", "offset"):
            return torch.full(part.shape, SCALE if name == "offset" else SCALE / 4)
        sequence = self.packed if part.dtype == torch.uint8 else self.scales
        return sequence[begin:][: part.shape[0]]

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Normally distributed weights, as many as the longest tensor has and the shift."""
        if dtype not in self.normals:
            self.normals[dtype] = torch.empty(self.length, dtype=dtype).normal_(0, DEVIATION, generator=self.draw)
        return self.normals[dtype]


def _small(skeleton: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """What transformers itself draws for every tensor that is no matrix, in float32."""
    found = {}
    for prefix, module in skeleton.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            matrix = parameter.dim() > 1 and isinstance(module, nn.Linear | nn.Embedding)
            if not matrix and parameter.numel() <= SMALL:
                module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32)))
                module._is_hf_initialized = False
                found[f"{prefix}.{name}"] = module
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        skeleton.initialize_weights()
    return {name: module.get_parameter(name.rpartition(".")[2]).detach() for name, module in found.items()}
