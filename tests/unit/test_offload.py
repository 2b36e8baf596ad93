"""The pool of pinned chunks, the order of copies, and how many layers' inputs wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import UserError
from configs.schema import Config, MemoryConfig, PackConfig
from prefix_train import budget, model, offload
from prefix_train.copies import Copier, Copy, LateCopier, Way
from prefix_train.dist import Ranks
from prefix_train.offload import Figures, Offload, Pool
from tests import models

CHUNK = 1024
MIB = 1 << 20


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PINNED_CHUNK", CHUNK)


# The pool.


def test_the_pool_hands_out_what_is_free(small_chunks: None) -> None:
    pool = Pool(5 * CHUNK, pinned=False)
    first, second = pool.take(2 * CHUNK + 1), pool.take(CHUNK)
    assert [len(first), len(second)] == [3, 1]
    assert len({chunk.data_ptr() for chunk in (*first, *second)}) == 4
    assert (pool.size, pool.used, pool.peak) == (5 * CHUNK, 4 * CHUNK, 4 * CHUNK)
    pool.give(first)
    assert (pool.used, pool.peak) == (CHUNK, 4 * CHUNK)
    assert len(pool.take(4 * CHUNK)) == 4


def test_a_full_pool_is_an_error_and_stays_as_it_is(small_chunks: None) -> None:
    pool = Pool(5 * CHUNK, pinned=False)
    pool.take(4 * CHUNK)
    with pytest.raises(RuntimeError, match=r"2,048 bytes do not fit, 4,096 of 5,120 pinned ones are in use"):
        pool.take(2 * CHUNK)
    assert pool.used == 4 * CHUNK
    assert len(pool.take(1)) == 1


def rounded_up(sizes: list[int]) -> int:
    """What torch's pinned allocator holds at last: each size as a power of two, one block for each such size."""
    return sum({1 << (size - 1).bit_length() for size in sizes})


def test_r24_alternating_sizes_take_no_more_than_the_largest() -> None:
    """Packs on both sides of 1 GiB: the pool is that of the larger, within 5% of its tensors."""
    sizes = [budget.tensor_bytes(positions, 5120) for positions in (100_000, 110_000, 100_000, 110_000)]
    assert sizes[0] < 1 << 30 < sizes[1]
    layers = 63
    pinned = budget.pinned_bytes(layers, 110_000, 5120)
    assert pinned <= 1.05 * layers * max(sizes)
    assert pinned % budget.PINNED_CHUNK == 0
    assert rounded_up([budget.PINNED_CHUNK]) == budget.PINNED_CHUNK


def test_r24_fails_without_fix() -> None:
    """The fault: a pinned tensor for each input."""
    sizes = [budget.tensor_bytes(positions, 5120) for positions in (100_000, 110_000)]
    assert rounded_up(sizes) > 2.5 * max(sizes)


# Copies.


def copied(copier: Copier, way: Way, source: Tensor) -> tuple[Tensor, Copy]:
    target = torch.zeros_like(source)
    return target, Copy(copier, way, [target], [source])


def test_a_late_copy_is_made_when_it_is_waited_for() -> None:
    copier = LateCopier()
    source = torch.arange(3)
    target, copy = copied(copier, "out", source)
    source += 1
    assert target.tolist() == [0, 0, 0]
    copy.finish()
    assert target.tolist() == [1, 2, 3]
    source += 1
    copy.finish()
    assert target.tolist() == [1, 2, 3]


def test_copies_of_one_way_follow_each_other() -> None:
    copier = LateCopier()
    first, one = copied(copier, "out", torch.ones(2))
    second, two = copied(copier, "out", torch.ones(2))
    back, three = copied(copier, "back", torch.ones(2))
    two.finish()
    assert (first.sum(), second.sum(), back.sum()) == (2, 2, 0)
    one.finish()
    three.finish()
    assert back.sum() == 2


def test_a_copy_that_is_dropped_is_waited_for() -> None:
    target, copy = copied(LateCopier(), "back", torch.ones(2))
    del copy
    assert target.sum() == 2


# How many layers.


def attached(offloaded: str, **given: Any) -> tuple[model.Root, Offload | None]:
    config = Config(memory=MemoryConfig(offload=offloaded), pack=PackConfig(max_positions=70), **given)
    root = model.Root(model.prepare(models.build("qwen3_5_text"), config), torch.float32, 3, images=False)
    return root, offload.attach(root, config, torch.device("cpu"))


@pytest.mark.parametrize(("offloaded", "count"), [("none", 0), ("1", 1), ("3", 3), ("4", 3), ("99", 3), ("auto", 3)])
def test_the_first_layers_and_never_the_last(offloaded: str, count: int, small_chunks: None) -> None:
    _, made = attached(offloaded)
    if made is None:
        assert count == 0
        return
    assert made.count == count
    assert made.pool.size == budget.pinned_bytes(count, 70, 32, itemsize=4) == count * 9 * CHUNK
    assert made.pool.used == 0


def test_memory_that_is_not_to_be_had_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore of it")

    root, _ = attached("none")
    config = Config(memory=MemoryConfig(offload="2"), pack=PackConfig(max_positions=70))
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(UserError, match=r"memory.offload=2: 0.1 GiB .* \(CUDA error: out of memory\): give"):
        offload.attach(root, config, torch.device("cpu"))


# What is told.


def test_figures_are_of_what_was_done_since_they_were_asked_for() -> None:
    made = Offload(1, Pool(0, pinned=False), LateCopier())
    made.copied = 5
    assert made.figures() == Figures(copied=5, copying_s=0.0, stalled_s=0.0, pinned_peak=0)
    assert made.figures().copied == 0


def test_the_hidden_share() -> None:
    assert Figures(1, 2.0, 0.5, 1).hidden == 0.75
    assert Figures(1, 0.0, 0.0, 1).hidden is None


class Clocked(LateCopier):
    def spent(self) -> tuple[float, float]:
        return 4.0, 1.0


def test_metrics_and_the_line_at_the_start() -> None:
    alone = Ranks(0, 1, torch.device("cpu"), None)
    made = Offload(3, Pool(2 * budget.PINNED_CHUNK, pinned=False), Clocked())
    made.pool.take(1)
    made.copied = 7
    assert offload.metrics(made, alone) == {
        "offload_bytes": 7,
        "offload_pinned_bytes": 64 * MIB,
        "offload_hidden": 0.75,
    }
    made.copier = LateCopier()
    assert "offload_hidden" not in offload.metrics(made, alone)
    assert offload.describe(made) == "offload: inputs of 3 layers wait in 0.12 GiB per rank, 2 chunks of 64 MiB"
    made.middles = 2
    assert offload.describe(made).startswith("offload: inputs of 3 layers and middles of 2 wait in 0.12 GiB")
