"""Frozen weights that pass through block by block: the same gradients as where they stay, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_train import blame, gradients, step, unit
from prefix_train.collate import Batch
from prefix_train.stream import engine, frozen, ring, schedule, walk
from prefix_train.stream.ring import Ring
from prefix_train.stream.store import Store
from tests import batches, models, streaming

COUNT = 7
"""Examples of an update: some share a root of the tree alone, some a second segment below it."""

GROUPS = ([[0, 1, 2, 3, 4, 5, 6]], [[0, 1, 2, 3], [4], [5, 6]], [[index] for index in range(COUNT)])
"""One pack of depth 3, packs and a standalone example, and standalone examples alone."""


def packs(made: Any, groups: Sequence[Sequence[int]], images: bool = False) -> list[Batch]:
    return batches.batches(batches.make(made, COUNT, images=images), groups)


def require_equal(both: streaming.Pair, given: Sequence[Batch], updates: int = 1, lr: float = 0.0) -> None:
    """Results and gradients of so many updates, and what they make of the parameters."""
    for number in range(updates):
        mine, theirs = streaming.updated(both, given, number, lr)
        assert streaming.unlike(streaming.gradient(both.stream), streaming.gradient(both.whole)) == []
        assert mine == theirs
    assert streaming.unlike(both.stream.parameters, both.whole.parameters) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("weights", ["plain", "nf4"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3", "llama", "qwen3_next", "qwen3_5_moe_text"])
def test_gradients_are_equal_to_the_bit(family: str, weights: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    made = streaming.built(family, dtype)
    store = streaming.stored(made, tmp_path / "store", weights)
    adapter = {"targets": ["q_proj", "out_proj"]} if family == "qwen3_next" else {}
    both = streaming.pair(made, store, streaming.options(dtype, adapter=adapter))
    require_equal(both, packs(made, GROUPS[1]))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Store]:
    """A hybrid model of 4 blocks in bfloat16, and its NF4 store."""
    made = streaming.built("qwen3_5_text", torch.bfloat16)
    return made, streaming.stored(made, tmp_path_factory.mktemp("hybrid") / "store", "nf4", double=True)


@pytest.mark.parametrize("at_once", [1, 2, 7])
@pytest.mark.parametrize("groups", GROUPS, ids=["one pack", "packs", "standalone"])
@pytest.mark.parametrize("resident", [1, 3])
def test_for_packs_alone_and_together(
    hybrid: tuple[Any, Store], groups: list[list[int]], at_once: int, resident: int
) -> None:
    made, store = hybrid
    config = streaming.options(torch.bfloat16, stream={"packs_per_visit": at_once})
    both = streaming.pair(made, store, config, lr=1e-2, resident=resident)
    require_equal(both, packs(made, groups), updates=3, lr=1e-2)


@pytest.mark.parametrize("merger", [True, False])
@pytest.mark.parametrize("family", models.WITH_VISION)
def test_with_images_and_without(family: str, merger: bool, tmp_path: Path) -> None:
    """The merger learns through all blocks, below the lowest adapter too; packs of text send a blank image."""
    made = streaming.built(family, torch.bfloat16)
    store = streaming.stored(made, tmp_path / "store", "nf4")
    config = streaming.options(
        torch.bfloat16, adapter={"merger": merger, "targets": ["q_proj"]}, stream={"packs_per_visit": 2}
    )
    both = streaming.pair(made, store, config, images=True)
    examples = batches.make(made, COUNT, images=True)
    text = batches.make(made, 2)
    given = [
        *batches.batches(examples, [[0, 1, 2, 3], [4], [5, 6]]),
        *batches.batches(text, [[0], [1]]),
    ]
    require_equal(both, given, updates=2)
    learned = [name for name in both.stream.parameters if "merger" in name]
    assert bool(learned) == merger
    assert any("deepstack_merger" in name for name in learned) == (merger and family.startswith("qwen3_vl"))


@pytest.mark.parametrize("changes", [{"tile_rows": 0}, {"tile_rows": 2048}])
@pytest.mark.parametrize("words", [0, 64])
def test_with_and_without_tiles(hybrid: tuple[Any, Store], changes: dict[str, Any], words: int) -> None:
    made, store = hybrid
    train = {"loss_chunk_words": words, "loss_chunk_rows": 5}
    require_equal(
        streaming.pair(made, store, streaming.options(torch.bfloat16, memory=changes, train=train)),
        packs(made, GROUPS[1]),
    )


def test_evaluation_is_equal_too(hybrid: tuple[Any, Store]) -> None:
    made, store = hybrid
    both = streaming.pair(made, store, streaming.options(torch.bfloat16))
    for root in (both.stream.root, both.whole.root):
        root.eval()
    for batch in packs(made, GROUPS[1]):
        with torch.no_grad():
            mine, theirs = (root(batch) for root in (both.stream.root, both.whole.root))
        assert torch.equal(mine.each, theirs.each)
        assert torch.equal(mine.loss, theirs.loss)


# How often a block is there, and how many at a time.


@pytest.mark.parametrize(("target", "lowest"), [("q_proj", 3), ("out_proj", 0), ("in_proj_z", 0)])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("resident", [0, 1, 3])
def test_visits_and_reads_are_those_planned(
    hybrid: tuple[Any, Store], target: str, lowest: int, slots: int, resident: int
) -> None:
    made, store = hybrid
    config = streaming.options(torch.bfloat16, adapter={"targets": [target]}, stream={"slots": slots})
    both = streaming.pair(made, store, config, resident=resident)
    assert both.root.lowest == lowest
    given = packs(made, GROUPS[1])
    figures = both.root.ring.figures
    for number in range(2):
        require_equal(both, given)
        passes = (number + 1) * len(given)
        assert figures.visits == passes * (2 * len(store.layers) - lowest)
        assert figures.reads == sum(schedule.reads(len(store.layers), lowest, slots, resident, passes))
    assert figures.nbytes <= figures.reads * max(block.nbytes for block in store.layers)


def test_packs_together_cost_one_reading(hybrid: tuple[Any, Store]) -> None:
    made, store = hybrid
    read = {}
    for at_once in (1, 3):
        config = streaming.options(torch.bfloat16, stream={"packs_per_visit": at_once})
        both = streaming.pair(made, store, config)
        require_equal(both, packs(made, GROUPS[1]), updates=4)
        read[at_once] = both.root.ring.figures.nbytes
    assert read[1] > 2.5 * read[3]


def test_no_more_blocks_live_than_there_are_slots(hybrid: tuple[Any, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block's parameters are made of lies in the slots and the residents' memory, and nowhere else."""
    made, store = hybrid
    both = streaming.pair(made, store, streaming.options(torch.bfloat16), resident=1)
    slots = [memory.untyped_storage().data_ptr() for memory in both.root.ring._slots]
    stay = [memory.untyped_storage().data_ptr() for memory in both.root.ring._resident.values()]
    seen = set()
    within = frozen.Frozen.within

    def watched(self: frozen.Frozen, buffer: Tensor) -> Any:
        seen.add(buffer.untyped_storage().data_ptr())
        return within(self, buffer)

    monkeypatch.setattr(frozen.Frozen, "within", watched)
    require_equal(both, packs(made, GROUPS[1]))
    assert seen == {*slots, *stay}
    assert len(slots) == 2
    assert len(stay) == 1
    assert all(parameter.is_meta for layer in both.root.anatomy.layers for parameter in frozen_parameters(layer))


def test_a_matrix_is_not_read_after_its_visit(hybrid: tuple[Any, Store]) -> None:
    made, store = hybrid
    root = streaming.pair(made, store, streaming.options(torch.bfloat16)).root
    linear: Any = root.anatomy.layers[0].mlp.up_proj  # type: ignore[union-attr]
    inputs = torch.ones(2, 32, dtype=torch.bfloat16)
    root.ring.begin([0])
    with root.visit(0):
        kept = linear.weight
        assert type(kept) is frozen.Packed
        theirs = made.model.layers[0].mlp.up_proj(inputs)
        assert torch.equal(torch.nn.functional.linear(inputs, kept), theirs)
        assert torch.equal(inputs @ kept.mT, theirs)
    assert linear.weight.is_meta
    with pytest.raises(RuntimeError, match=r"mlp\.up_proj\.weight is read after the visit"):
        torch.nn.functional.linear(inputs, kept)


def frozen_parameters(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in layer.parameters() if not parameter.requires_grad]


# Faults. Each must show.


def plant_no_wait(patch: pytest.MonkeyPatch) -> None:
    """Blocks are computed with before their bytes are there."""
    over, read_into, down = threading.Event(), Store.read_into, walk.Walk.down

    def late(self: Store, *args: Any) -> None:
        over.wait(20)
        read_into(self, *args)

    def last(self: walk.Walk, grads: Sequence[Tensor]) -> None:
        down(self, grads)
        over.set()

    patch.setattr(Store, "read_into", late)
    patch.setattr(walk.Walk, "down", last)
    patch.setattr(Ring, "_settle", lambda self, pieces: pieces.clear())


def plant_early_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot is given away although its block is needed before."""

    def load(self: schedule.Schedule) -> schedule.Load | None:
        wanted = [unit for unit in self._coming[:1] if unit not in self.resident and unit not in self.held]
        return schedule.Load(0, wanted[0]) if wanted else None

    def enter(self: schedule.Schedule, unit: int) -> int | None:
        self.visiting = self._coming.pop(0)
        return None if unit in self.resident else 1

    patch.setattr(schedule.Schedule, "_next_load", load)
    patch.setattr(schedule.Schedule, "enter", enter)


def plant_other_order(patch: pytest.MonkeyPatch) -> None:
    """Packs go down in another order than they came."""
    down = walk.Walk.down

    def turned(self: walk.Walk, grads: Sequence[Tensor]) -> None:
        self.passages.reverse()
        down(self, grads[::-1])

    patch.setattr(walk.Walk, "down", turned)


def plant_no_flag(patch: pytest.MonkeyPatch) -> None:
    """The last draw's masks are used for every pack on the way down."""
    again = unit.again

    def last(layer: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["layout"].draw = "another"
        return again(layer, *args, **kwargs)

    patch.setattr(walk.unit, "again", last)


def plant_whole_words(patch: pytest.MonkeyPatch) -> None:
    """The head is cut otherwise than where it stays."""
    init = engine.Head.__init__
    patch.setattr(engine.Head, "__init__", lambda self, source, words: init(self, source, 32))


@pytest.mark.parametrize(
    "plant", [plant_no_wait, plant_early_slot, plant_other_order, plant_no_flag, plant_whole_words]
)
def test_a_fault_shows(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = streaming.built("qwen3_5_text", torch.float32)
    store = streaming.stored(made, tmp_path / "store", "nf4")
    config = streaming.options(torch.float32, stream={"packs_per_visit": COUNT})
    given = packs(made, GROUPS[2])
    require_equal(streaming.pair(made, store, config), given)
    plant(monkeypatch)
    both = streaming.pair(made, store, config)
    step.update(both.whole, 0, 0.0, given)
    try:
        step.update(both.stream, 0, 0.0, given)
    except (blame.NotFinite, gradients.NothingLearned):
        return  # what a fault makes of a slot's bytes follows from what was there before
    assert streaming.unlike(streaming.gradient(both.stream), streaming.gradient(both.whole))


@pytest.mark.parametrize("waits", [True, False])
def test_a_slot_of_a_pass_that_was_broken_off_is_not_written_to_twice(
    hybrid: tuple[Any, Store], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """waits: for the old bytes, which come late, before a slot is given away to others."""
    _, store = hybrid
    late, read_into = threading.Event(), Store.read_into

    def read(self: Store, block: Any, *args: Any) -> None:
        if block.name == "block.1":
            late.wait(20)
        read_into(self, block, *args)

    monkeypatch.setattr(Store, "read_into", read)
    units = [ring.Unit.whole(block) for block in store.layers]
    made = Ring(ring.Source(store, torch.device("cpu"), readers=2), units, 2)
    made.begin([0, 1])
    old = list(made._coming[1])
    if waits:
        threading.Timer(0.1, late.set).start()
    else:
        made._coming[1] = []
    made.begin([2, 3])  # block 1 is still on its way into the slot that block 3 gets, and was never visited
    with made.visit(2):
        pass
    with made.visit(3) as memory:
        late.set()
        for piece in old:
            piece.result()
        assert torch.equal(memory, store.bytes(store.layers[3])) == waits


def test_after_a_pass_that_was_broken_off_the_next_is_whole(
    hybrid: tuple[Any, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(RuntimeError):
        pass

    made, store = hybrid
    both, given = streaming.pair(made, store, streaming.options(torch.bfloat16)), packs(made, GROUPS[1])
    rise = walk.Walk._rise

    def third(self: walk.Walk, passage: Any, index: int, *given: Any) -> None:
        if index == 2:
            raise Broken
        rise(self, passage, index, *given)

    monkeypatch.setattr(walk.Walk, "_rise", third)
    with pytest.raises(Broken):
        step.update(both.stream, 0, 0.0, given)
    monkeypatch.setattr(walk.Walk, "_rise", rise)
    require_equal(both, given)


def test_pieces_are_put_together(hybrid: tuple[Any, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks larger than one read."""
    monkeypatch.setattr(ring, "PIECE", 1000)
    made, store = hybrid
    require_equal(streaming.pair(made, store, streaming.options(torch.bfloat16)), packs(made, GROUPS[1]))
