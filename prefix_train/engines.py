"""The two engines, as the run sees them: `sharded`, where weights stay, and `stream`, where they pass through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from configs.errors import UserError
from configs.schema import Config
from prefix_train import machine, offload, shard
from prefix_train import model as models
from prefix_train.budget import Shape
from prefix_train.dist import Ranks
from prefix_train.offload import Offload
from prefix_train.stream import engine, planner
from prefix_train.stream.engine import Streamed
from prefix_train.stream.store import Store
from prefix_train.stream.whole import Check


def load(config: Config, whole: bool = False) -> tuple[PreTrainedModel, Any]:
    """The model that the engine of `config` starts from, and its processor. Raises UserError as `model.load` does.

    whole: with all weights, also where they would pass through: those that the store gives.
    """
    if config.engine == "stream":
        return engine.load(config.model, open_store(config, every_byte=whole), whole)
    return models.load(config.model)


def prepare(model: PreTrainedModel, config: Config, device: torch.device) -> nn.Module:
    """The model that `load` gave, ready to be trained on `device`, where it is not yet; see `model.prepare`."""
    config = machine.settle(config, device, model)
    return (engine.prepare if config.engine == "stream" else models.prepare)(model, config)


def open_store(config: Config, every_byte: bool = False) -> Store:
    """The store that `config` names. UserError where there is none, or where it is damaged.

    every_byte: hashes are compared too, unless `stream.check` is `size`.
    """
    if config.stream.store is None:
        raise UserError("engine=stream needs stream.store: make one with `prefix-train stream build`")
    return Store.open(Path(config.stream.store), config.stream.check if every_byte else "size")


@contextmanager
def checking(config: Config) -> Iterator[Check | None]:
    """Within it the run's store is read in threads, and `Check.wait` says whether it is whole; none with
    `stream.check=size`, or where weights do not stream.
    """
    if config.engine != "stream" or config.stream.check == "size":
        yield None
        return
    check = Check(open_store(config))
    try:
        yield check
    finally:
        check.close()


def make_root(
    model: nn.Module, config: Config, ranks: Ranks, images: bool, largest: Shape
) -> tuple[models.Root, Offload | None]:
    """The root of a prepared model on this rank's device, and what lets its layers' inputs wait on the host.

    Every rank calls it. largest: pack of the run. Raises UserError where device or host lack the memory.
    """
    if config.engine == "stream":
        root = ranks.together(lambda: _stream(model, config, ranks, images, largest))
        return root, root.offload
    train = config.train
    dtype = models.DTYPES[config.model.dtype]
    resident = models.Root(model, dtype, train.loss_chunk_rows, images, train.loss_chunk_words)
    if ranks.mesh is None:
        resident.to(ranks.device)
    else:
        shard.shard(resident, ranks.mesh)
    return resident, ranks.together(lambda: offload.attach(resident, config, ranks.device))


def _stream(model: nn.Module, config: Config, ranks: Ranks, images: bool, largest: Shape) -> Streamed:
    """Planned first, and refused if the budget is too small; torch's allocator is given what the plan leaves it."""
    store = open_store(config)
    plan = planner.make(config, largest)
    if not plan.fits:
        print(plan.describe(), flush=True)
        plan.refuse()
    if ranks.device.type == "cuda":
        total = torch.cuda.get_device_properties(ranks.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (plan.limit - plan.beside) / total), ranks.device)
    root = Streamed(model, config, store, ranks.device, images, plan.resident, plan.limit, beside=plan.beside)
    root.measure_pace(largest.positions)
    return root
