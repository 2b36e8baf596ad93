"""What a visit of a block costs the host is counted, and does not grow unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_train import precision, products
from prefix_train.stream.engine import Streamed
from tests import launches, tape, visits

RECORDED = "recorded launches"
VISITS = 2 * visits.MODEL["num_hidden_layers"]


@pytest.fixture(scope="module")
def update(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[[], None], Streamed]:
    run, root = visits.small(tmp_path_factory.mktemp("small") / "store")
    run()
    return run, root


def test_a_visit_costs_no_more_than_it_did(update: tuple[Callable[[], None], Streamed]) -> None:
    """Operations on a CPU: its dequantising is a chain of them, on CUDA one kernel."""
    run, root = update
    before = root.ring.figures.visits
    counts = visits.count(run)
    assert root.ring.figures.visits - before == 2 * VISITS
    beside = counts.total("operations") - counts.operations["dequantising"]
    assert beside / VISITS <= 312, visits.table(counts, VISITS)
    assert counts.total("calls") / VISITS <= 2350, visits.table(counts, VISITS)


def test_all_parts_are_seen(update: tuple[Callable[[], None], Streamed]) -> None:
    """Should a part be renamed, its counts would be another's."""
    counts = visits.count(update[0])
    assert {part for part in visits.PARTS if not counts.calls[part]} == {RECORDED}, visits.table(counts, VISITS)


def test_recorded_launches_leave_the_host_little_to_do(tmp_path: Path) -> None:
    run, _ = visits.small(tmp_path / "store", visits.Nothing(), graphs="on")
    for _ in range(3):
        run()
    counts = visits.count(run)
    assert counts.calls[RECORDED] > 0
    assert counts.total("operations") / VISITS <= 10, visits.table(counts, VISITS)
    assert counts.total("calls") / VISITS <= 270, visits.table(counts, VISITS)


def test_a_layout_that_comes_once_is_recorded_where_a_slot_is_used_again(tmp_path: Path) -> None:
    """Of each slot, up and down, the first visit is an ordinary one; so is that of the lowest block, which ends it."""
    recorder = tape.Recorder()
    run, root = visits.small(tmp_path / "store", recorder, graphs="on")
    run()
    slots = len(root.ring.slots)
    assert len(recorder.tapes) == 2 * slots
    assert recorder.plays == VISITS - 2 * slots - 1
    assert recorder.rooms == 2
    run()
    assert recorder.plays == 2 * VISITS - 2 * slots - 1


# What a GPU would launch.

BLOCKS = 2
PLAIN = {**visits.MODEL, "num_hidden_layers": BLOCKS}
HYBRID = {**visits.HYBRID, "num_hidden_layers": BLOCKS, "layer_types": ["linear_attention"] * BLOCKS}
FUSED = {"heads": "fused", "elementwise": "fused"}
MOST: dict[str, tuple[dict[str, Any], list[str], dict[str, Any], dict[str, int]]] = {
    "plain": (PLAIN, visits.TARGETS, {}, {"up": 98, "once more": 74, "backward": 175}),
    "plain, fused": (PLAIN, visits.TARGETS, FUSED, {"up": 76, "once more": 52, "backward": 126}),
    "hybrid": (HYBRID, visits.OF_HYBRID, {}, {"up": 100, "once more": 76, "backward": 140}),
}
"""Of all blocks, by part of their visits; kernels of attention and of the recurrence are one each way."""


def counted(folder: Path, kind: str) -> launches.Launches:
    sizes, targets, kernels, _ = MOST[kind]
    with launches.kernels():
        run, root = visits.small(folder / "store", build_of=sizes, targets=targets, positions=128, kernels=kernels)
        run()
        found = launches.count(run)
        root.source.close()
    return found


@pytest.mark.parametrize("kind", MOST)
def test_a_block_launches_no_more_than_it_did(kind: str, tmp_path: Path) -> None:
    found = counted(tmp_path, kind)
    for part, most in MOST[kind][-1].items():
        assert 0 < found.total(part) <= most, launches.table(found, BLOCKS)


def test_launches_that_come_back_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and their gradients cast one by one, and rows of a single tile copied."""

    def one_by_one(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [tensor.to(dtype) for tensor in tensors]

    def copied(tiles: list[Tensor | None]) -> Tensor | None:
        there = [tile for tile in tiles if tile is not None]
        return torch.cat(there) if there else None

    monkeypatch.setattr(precision, "_copied", one_by_one)
    monkeypatch.setattr(products, "rows", copied)
    found = counted(tmp_path, "plain")
    adapters, modules = 2 * len(visits.TARGETS), 4  # a feed-forward makes its rows again
    most = MOST["plain"][-1]
    assert found.total("up") == most["up"] + (adapters - 1 + modules) * BLOCKS
    assert found.total("backward") == most["backward"] + (adapters - 1) * BLOCKS
