"""What is compared: a model's shape, one example, adapters with given values, and names of gradients."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from configs import compose
from configs.schema import Config
from prefix_train import budget
from prefix_train.bench import random_examples
from prefix_train.bench_pack import geometry_file
from prefix_train.geometry import Geometry, read_config
from prefix_train.render import Example
from prefix_train.stream import places, random_store, sources
from prefix_train.stream.bench import OPTIONS
from prefix_train.stream.build import build
from prefix_train.stream.origin import MANIFEST
from prefix_train.stream.store import Store

FACTOR = re.compile(r"layers\.(\d+)\.(.+?)\.lora_([AB])\b")
"""A LoRA factor's layer, module and letter, in everybody's names."""

IGNORED = -100
"""Label of a token that is no target, as transformers has it."""


@dataclass(frozen=True)
class Case:
    """One size. folder: where stores and shards of random weights are made, and found again. warm: timed updates."""

    geometry: str
    layers: int
    positions: int
    budget_gib: float
    folder: str
    warm: int = 3
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{self.layers}x{self.positions}"

    def config(self) -> Config:
        """The geometry with so many layers, streaming within the budget."""
        own = (f"stream.budget_gib={self.budget_gib}", f"pack.max_positions={self.positions}", "adapter.dropout=0.0")
        config = compose.load(geometry_file(self.geometry), [*OPTIONS, "stream.store=.", *own, *self.overrides])
        model = replace(config.model, build={**config.model.build, "num_hidden_layers": self.layers})
        return replace(config, model=model, stream=replace(config.stream, store=str(self.path("store"))))

    def path(self, what: str) -> Path:
        """Of this model's weights in a format."""
        return Path(self.folder) / f"{Path(self.geometry).stem}-{self.layers}-{what}"

    def store(self) -> Store:
        """In NF4; made now if it is not there."""
        config, folder = self.config(), self.path("store")
        if (folder / MANIFEST).is_file():
            found = Store.open(folder)
            sources.require_same(found, config.model)
            return found
        choice = places.Choice("nf4", getattr(torch, config.model.dtype))
        return build(random_store.generate(config.model, choice, 0), folder, choice)

    def example(self) -> Example:
        """Random tokens; the later half are targets."""
        config = self.config()
        vocabulary = Geometry.of(read_config(config.model)).vocabulary
        (found,) = random_examples(1, 1, self.positions - 1, vocabulary, config.seed)
        return found


def labels(example: Example) -> Tensor:
    """int64 [1, T]: each target's id, IGNORED elsewhere."""
    ids, target = torch.as_tensor(example.ids), torch.as_tensor(example.target)
    return torch.where(target, ids, torch.full_like(ids, IGNORED))[None]


def factor(name: str) -> str | None:
    """What the LoRA factor of this name is called here: layer/module/A or B; none for other parameters."""
    found = FACTOR.search(name)
    return f"{found[1]}/{found[2]}/{found[3]}" if found else None


def factors(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The LoRA factors among parameters, by `factor`."""
    return {name: one for name, one in ((factor(name), one) for name, one in named.items()) if name is not None}


def draw(parameters: Mapping[str, nn.Parameter]) -> None:
    """Give every factor the values that its name decides, rounded to bfloat16, in which some keep them."""
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        scale = 0.02 if name.endswith("B") else parameter.shape[-1] ** -0.5
        values = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data.copy_(values.to(torch.bfloat16))


class Rival(Protocol):
    """A program that is compared."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """LoRA factors by `factor`, with the last update's gradients."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """How it was set up."""
        ...

    def update(self) -> None:
        """One update of the adapters."""
        ...

    def read_bytes(self) -> int:
        """Bytes of weights brought to the device so far."""
        ...


Maker = Callable[[Case, torch.device], Rival]


def limit(case: Case, device: torch.device, context: int) -> None:
    """Let torch's allocator have what the budget leaves beside CUDA's own `context` bytes."""
    if device.type == "cuda":
        total: Any = torch.cuda.get_device_properties(device).total_memory
        share = (case.budget_gib * budget.GIB - context) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
