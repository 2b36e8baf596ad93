"""Trainers whose layers' inputs wait on the host, and a copier that is as late and as forgetful as a device may be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from configs.schema import AdapterConfig, Config, MemoryConfig, ModelConfig, PackConfig, TrainConfig
from prefix_train import anatomy, budget, gradients, model, offload, step
from prefix_train.collate import Batch
from prefix_train.copies import Copier, Copy, LateCopier, Way
from prefix_train.dist import Ranks
from prefix_train.offload import Stored
from tests import batches

CHUNK = 4096
"""Bytes of a chunk, in place of 64 MiB: a tiny model's layer input takes several, the last of them not full."""

POISON = 0xFF
"""Bytes of memory that somebody else has by now: NaN in every floating dtype."""


class Part(NamedTuple):
    """A piece of memory that is not held."""

    storage: StorageWeakRef
    offset: int
    length: int

    @classmethod
    def of(cls, piece: Tensor) -> Part:
        return cls(StorageWeakRef(piece.untyped_storage()), piece.storage_offset(), len(piece))

    def alive(self) -> Tensor | None:
        """[length] uint8, or None where nobody holds the memory any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.offset, (self.length,))  # type: ignore[call-overload,no-any-return]


class Forgotten:
    """A copy whose memories are held by who asked for it, or by nobody."""

    def __init__(self, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.way, self.made = way, False
        self.pairs = [(Part.of(target), Part.of(source)) for target, source in zip(targets, sources, strict=True)]

    def make(self) -> None:
        self.made = True
        for into, out_of in self.pairs:
            target, source = into.alive(), out_of.alive()
            if target is not None:
                target.fill_(POISON) if source is None else target.copy_(source)


class ForgetfulCopier(LateCopier):
    """As with a device's allocator: memory that nobody holds is somebody else's when the copy is made."""

    def start(self, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        asked = Forgotten(way, targets, sources)
        for into, _ in asked.pairs:
            target = into.alive()
            assert target is not None
            if way == "back":
                target.fill_(POISON)  # what memory holds before a copy arrives is anybody's
        self._asked[way].append(asked)  # type: ignore[arg-type]
        return asked


class Recording(ForgetfulCopier):
    """What was asked for, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def start(self, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        self.asked.append(way)
        return super().start(way, targets, sources)

    def wait(self, ticket: Any) -> None:
        self.asked.append(f"{ticket.way} done")
        super().wait(ticket)


class Trained(NamedTuple):
    stepper: step.Stepper
    offload: offload.Offload | None


def trained(
    base: Any,
    packs: Sequence[Batch],
    offloaded: str,
    *,
    copier: Copier | None = None,
    device: str = "cpu",
    lr: float = 0.0,
    kernels: ModelConfig | None = None,
    keep: str = "none",
    middle: str = "none",
    tile_rows: int = MemoryConfig.tile_rows,
    **adapter: Any,
) -> Trained:
    """A trainer of `base`, whose pool holds the largest of `packs` and not a chunk more.

    adapter: options of adapters that are trained; none: all of the model is.
    """
    config = Config(
        model=kernels or ModelConfig(),
        train=TrainConfig(trainable="adapter" if adapter else "all"),
        adapter=AdapterConfig(**adapter),
        memory=MemoryConfig(offload=offloaded, keep_attention=keep, keep_middle=middle, tile_rows=tile_rows),
        pack=PackConfig(max_positions=max(pack.positions for pack in packs)),
    )
    dtype = next(base.parameters()).dtype
    prepared = model.prepare(base.to(device), config)
    with torch.no_grad():
        for name, parameter in anatomy.trainable(prepared).items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    root = model.Root(prepared, dtype, chunk_rows=3, images=False).to(device)
    parameters = anatomy.trainable(prepared)
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr)
    ranks = Ranks(0, 1, torch.device(device), None)
    coverage = gradients.Coverage(list(parameters), frozenset(), warmup=99)
    stepper = step.Stepper(root, parameters, optimizer, ranks, coverage, seed=5, clip_norm=1.0)
    return Trained(stepper, offload.attach(root, config, ranks.device, copier))


def taken(stepper: step.Stepper) -> dict[str, Tensor]:
    """The gradients that the last update left, by name."""
    return {name: parameter.grad.clone() for name, parameter in stepper.parameters.items()}  # type: ignore[union-attr]


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Are all tensors equal, bit for bit?"""
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name].cpu(), theirs[name].cpu()) for name in theirs)


def backward(run: Trained, packs: Sequence[Batch]) -> dict[str, Tensor]:
    """Gradients of the packs together, by forward and backward alone."""
    run.stepper.optimizer.zero_grad()
    for number, pack in enumerate(packs):
        run.stepper.root(pack.to(run.stepper.ranks.device), draw=str(number)).loss.backward()
    return taken(run.stepper)


def needed(run: Trained, packs: Sequence[Batch]) -> int:
    """Bytes of the pool that `packs`, waiting for their backward together, need."""
    assert run.offload is not None
    width = run.stepper.root.anatomy.base.get_input_embeddings().embedding_dim
    itemsize = run.stepper.root.dtype.itemsize
    return sum(budget.pinned_bytes(run.offload.count, pack.positions, width, itemsize=itemsize) for pack in packs)


COUNT = 7
"""Examples of an update."""


def fifty_updates(base: Any, offloaded: str, **given: Any) -> Iterator[dict[str, Tensor]]:
    """Each update's gradients; packs of ever other sizes after each other, one to four in an update."""
    examples = batches.make(base, COUNT)
    updates = [batches.batches(examples, batches.regroup(COUNT, 1 + seed % 4, seed)) for seed in range(50)]
    everything = [pack for packs in updates for pack in packs]
    made = trained(copy.deepcopy(base), everything, offloaded, lr=1e-3, rank=2, dropout=0.3, **given)
    for number, packs in enumerate(updates):
        step.update(made.stepper, number, 1e-3, packs)
        yield taken(made.stepper)
    if made.offload is not None:
        assert made.offload.pool.used == 0
        assert made.offload.pool.peak == made.offload.pool.size
        row = (made.offload.count + made.offload.middles) * 32 * 4
        assert made.offload.copied == 2 * sum(row * pack.layout.total for pack in everything)


# Faults. Each must show in the gradients.

Plant = Callable[[pytest.MonkeyPatch], None]


def plant_no_wait(kind: type[Copier], way: Way) -> Plant:
    """Computing goes on without waiting for this way's copies. kind: a copier whose tickets have a `way`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        wait = kind.wait
        patch.setattr(kind, "wait", lambda self, ticket: None if ticket.way == way else wait(self, ticket))

    return plant


def plant_let_go(patch: pytest.MonkeyPatch) -> None:
    """Memory goes back to the allocator while it is still being copied."""
    init, nothing = Copy.__init__, torch.zeros(0)

    def holding_nothing(self: Copy, *args: Any) -> None:
        init(self, *args)
        self._held = ((), ())

    patch.setattr(Copy, "__init__", holding_nothing)
    patch.setattr(offload, "_UnderWay", lambda copy, source, version: (copy, nothing, nothing._version))


def plant_chunks_too_early(patch: pytest.MonkeyPatch) -> None:
    """Chunks are free again while their layer still waits for its backward."""
    store = Stored.store

    def planted(self: Stored, source: Tensor) -> Copy:
        copy = store(self, source)
        self._offload.pool.give(self._chunks)
        return copy

    patch.setattr(Stored, "store", planted)
