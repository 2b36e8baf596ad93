"""Two trainers of the same weights, one that has them all and one that they pass through."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import AdapterConfig, Config, ModelConfig, StreamConfig, TrainConfig
from prefix_train import anatomy, gradients, model, step
from prefix_train.collate import Batch, Targets
from prefix_train.dist import Ranks
from prefix_train.layout import Layout
from prefix_train.stream import build
from prefix_train.stream.engine import Streamed, fill, prepare
from prefix_train.stream.graphs import Recorder
from prefix_train.stream.places import Choice
from prefix_train.stream.store import Store
from tests import models

ALONE = Ranks(0, 1, torch.device("cpu"), None)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def built(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A tiny model whose weights are rounded to `dtype`, and its buffers are not, as where it is loaded."""
    made = models.build(family)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    return made


def stored(made: PreTrainedModel, folder: Path, weights: Literal["plain", "nf4"], double: bool = False) -> Store:
    """A store of `made`, which takes on the weights that the store gives back."""
    dtype = next(made.parameters()).dtype
    store = build.from_model(made, folder, Choice(weights, dtype, double))
    with torch.no_grad():
        for block in store.blocks:
            for name, tensor in store.tensors(block):
                made.get_parameter(name).copy_(tensor)
    return store


def hollow(made: PreTrainedModel, store: Store) -> PreTrainedModel:
    """`made` without the weights that pass through."""
    dtype = next(made.parameters()).dtype
    with init_empty_weights(include_buffers=False):
        skeleton = type(made)(copy.deepcopy(made.config))
    for parameter in skeleton.parameters():
        parameter.data = parameter.data.to(dtype)
    skeleton.tie_weights()
    fill(skeleton, store)
    if models.has_experts(skeleton):
        skeleton.set_experts_implementation("eager")
    return skeleton


def options(dtype: torch.dtype, **changes: Any) -> Config:
    """A configuration with dropout. changes: sections as dictionaries."""
    config = Config(
        engine="stream",
        model=ModelConfig(dtype=NAMES[dtype]),  # type: ignore[arg-type]
        adapter=AdapterConfig(rank=2, dropout=0.3),
        train=TrainConfig(loss_chunk_rows=3, loss_chunk_words=64),
        stream=StreamConfig(slots=2),
    )
    return replace(
        config, **{section: replace(getattr(config, section), **values) for section, values in changes.items()}
    )


@dataclass
class Pair:
    """stream, whole: trainers with the same adapters, none of them zero."""

    stream: step.Stepper
    whole: step.Stepper

    @property
    def root(self) -> Streamed:
        assert isinstance(self.stream.root, Streamed)
        return self.stream.root


def pair(
    made: PreTrainedModel,
    store: Store,
    config: Config,
    images: bool = False,
    lr: float = 0.0,
    resident: int = 0,
    recorder: Recorder | None = None,
) -> Pair:
    """Trainers of `made` and of `store`, which holds its weights. resident: how many blocks stay."""
    skeleton = prepare(hollow(made, store), config)
    stream = Streamed(skeleton, config, store, torch.device("cpu"), images, resident, recorder=recorder)
    dtype = next(made.parameters()).dtype
    train = config.train
    whole = model.Root(
        model.prepare(copy.deepcopy(made), config), dtype, train.loss_chunk_rows, images, train.loss_chunk_words
    )
    return Pair(_stepper(stream, config, lr), _stepper(whole, config, lr))


def _stepper(root: model.Root, config: Config, lr: float) -> step.Stepper:
    parameters = anatomy.trainable(root.model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    vision = frozenset(name for name in parameters if ".visual." in name)
    coverage = gradients.Coverage(list(parameters), vision, warmup=99)
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr)
    return step.Stepper(root, parameters, optimizer, ALONE, coverage, config.seed, config.train.clip_norm)


def gradient(stepper: step.Stepper) -> dict[str, Tensor]:
    """What the last update left, by name."""
    return {
        name: parameter.grad.clone() for name, parameter in stepper.parameters.items() if parameter.grad is not None
    }


def unlike(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal to the bit, or in one of the two only."""
    assert theirs
    return sorted(
        name
        for name in mine.keys() | theirs.keys()
        if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name])
    )


def updated(both: Pair, batches: Sequence[Batch], number: int = 0, lr: float = 0.0) -> tuple[Any, Any]:
    """One update by each."""
    return step.update(both.stream, number, lr, batches), step.update(both.whole, number, lr, batches)


def text_batch(lengths: Sequence[int], parents: Sequence[int], count: int, words: int, number: int = 0) -> Batch:
    """One example's batch of random ids below `words` in a tree, with `count` targets from the root's end on."""
    batch, draw = Batch(), torch.Generator().manual_seed(number)
    total, places = sum(lengths), torch.arange(count)
    batch.layout = Layout.from_tree(lengths, parents)
    batch.input_ids = torch.randint(0, words, (1, total), generator=draw)
    batch.position_ids, batch.pixel_values, batch.image_grid_thw = batch.layout.position_ids(), None, None
    rows = places + (lengths[0] - 1 if len(lengths) > 1 else 0)
    ids = torch.randint(0, words, (count,), generator=draw)
    batch.targets = Targets(rows, ids, torch.full((count,), 1 / count), torch.zeros_like(places), places)
    batch.grids, batch.positions, batch.logical, batch.members = (), total, total, (0,)
    return batch
