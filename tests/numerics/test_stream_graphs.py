"""Launches that are recorded once and repeated: the same gradients to the bit, and no more recordings than slots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.errors import UserError
from prefix_train import blame, gradients, step
from prefix_train.budget import GIB
from prefix_train.collate import Batch
from prefix_train.stream import fixed, graphs, readings
from prefix_train.stream.store import Store
from tests import batches, streaming, tape

COUNT = 7
GROUPS = [[0, 1, 2, 3], [4], [5, 6]]
"""Three packs of different layouts."""


def packs(made: Any, groups: Sequence[Sequence[int]] = GROUPS, images: bool = False) -> list[Batch]:
    return batches.batches(batches.make(made, COUNT, images=images), groups)


def options(dtype: torch.dtype, **changes: Any) -> Any:
    stream = {"slots": 2, "graphs": "on", **changes.pop("stream", {})}
    adapter = {"dropout": 0.0, **changes.pop("adapter", {})}
    return streaming.options(dtype, stream=stream, adapter=adapter, pack={"max_positions": 512}, **changes)


def require_equal(both: streaming.Pair, given: Sequence[Batch], updates: int, lr: float = 1e-2) -> None:
    for number in range(updates):
        mine, theirs = streaming.updated(both, given, number, lr)
        assert streaming.unlike(streaming.gradient(both.stream), streaming.gradient(both.whole)) == []
        assert mine == theirs
    assert streaming.unlike(both.stream.parameters, both.whole.parameters) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("weights", ["plain", "nf4"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3", "llama"])
def test_gradients_are_equal_to_the_bit(family: str, weights: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    made = streaming.built(family, dtype)
    store = streaming.stored(made, tmp_path / "store", weights)
    recorder = tape.Recorder()
    both = streaming.pair(made, store, options(dtype), lr=1e-2, recorder=recorder)
    require_equal(both, packs(made), updates=3)
    before, visits = (len(recorder.tapes), recorder.plays), both.root.ring.figures.visits
    require_equal(both, packs(made), updates=1)
    after = len(recorder.tapes), recorder.plays
    assert after == (before[0], before[1] + both.root.ring.figures.visits - visits)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Store]:
    """A hybrid model of 4 blocks in bfloat16, and its NF4 store."""
    made = streaming.built("qwen3_5_text", torch.bfloat16)
    return made, streaming.stored(made, tmp_path_factory.mktemp("hybrid") / "store", "nf4", double=True)


@pytest.mark.parametrize("tile_rows", [0, 2048])
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("resident", [0, 1, 3])
def test_for_packs_alone_and_together(hybrid: tuple[Any, Store], at_once: int, resident: int, tile_rows: int) -> None:
    made, store = hybrid
    config = options(torch.bfloat16, stream={"packs_per_visit": at_once}, memory={"tile_rows": tile_rows})
    both = streaming.pair(made, store, config, lr=1e-2, resident=resident, recorder=tape.Recorder())
    require_equal(both, packs(made), updates=4)


@pytest.mark.parametrize("merger", [True, False])
def test_with_images_and_without(merger: bool, tmp_path: Path) -> None:
    """The merger learns through all blocks; images' positions are a pack's own, whatever its layout."""
    made = streaming.built("qwen3_5", torch.bfloat16)
    store = streaming.stored(made, tmp_path / "store", "nf4")
    config = options(torch.bfloat16, adapter={"merger": merger}, stream={"packs_per_visit": 2, "graph_layouts": 5})
    both = streaming.pair(made, store, config, images=True, lr=1e-2, recorder=tape.Recorder())
    text = batches.batches(batches.make(made, 2), [[0], [1]])
    require_equal(both, [*packs(made, images=True), *text], updates=3)


def other_packs(number: int) -> list[Batch]:
    """Two packs of one layout and a third, other ids in each update."""
    lengths, parents = [20, 9, 5], [-1, 0, 0]
    given = [streaming.text_batch(lengths, parents, 8, 97, 3 * number + place) for place in range(2)]
    given[1].position_ids = given[1].position_ids + 7
    return [*given, streaming.text_batch([31], [-1], 8, 97, 3 * number + 2)]


def differences(both: streaming.Pair, updates: int) -> list[str]:
    found: list[str] = []
    for number in range(updates):
        streaming.updated(both, other_packs(number), number, 1e-2)
        found += streaming.unlike(streaming.gradient(both.stream), streaming.gradient(both.whole))
    return found


def test_what_is_a_packs_own_is_not_in_the_recording(hybrid: tuple[Any, Store]) -> None:
    made, store = hybrid
    recorder = tape.Recorder()
    config = options(torch.bfloat16, stream={"packs_per_visit": 2})
    both = streaming.pair(made, store, config, lr=1e-2, recorder=recorder)
    assert differences(both, 3) == []
    recorded = len(recorder.tapes)
    assert differences(both, 2) == []
    assert len(recorder.tapes) == recorded, "what was recorded is recorded again"
    kinds, layouts, directions = 2, 2, 2
    assert recorded <= kinds * layouts * directions * len(both.root.ring.slots)


@pytest.mark.parametrize("tile_rows", [0, 2048])
def test_counted_masks_are_new_in_each_update(
    hybrid: tuple[Any, Store], tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their seeds lie where the launches find them. Without these a recording keeps its masks."""
    made, store = hybrid
    adapter = {"dropout": 0.3, "masks": "counted"}
    config = options(torch.bfloat16, stream={"packs_per_visit": 2}, adapter=adapter, memory={"tile_rows": tile_rows})
    both = streaming.pair(made, store, config, lr=1e-2, recorder=tape.Recorder())
    assert differences(both, 4) == []
    take = fixed.Kind.take
    monkeypatch.setattr(fixed.Kind, "take", lambda self, adapters, seeds: take(self, adapters, seeds[:0]))
    assert differences(both, 1)


def plant_old_weights(patch: pytest.MonkeyPatch) -> None:
    """Adapters are those of the block that was recorded."""
    patch.setattr(fixed.Kind, "take", lambda self, *given: None)


def plant_old_arguments(patch: pytest.MonkeyPatch) -> None:
    """Positions are those of the pack that was recorded."""
    patch.setattr(fixed.Call, "fill", lambda self, leaves: None)


def plant_one_kind(patch: pytest.MonkeyPatch) -> None:
    """All blocks are taken for alike."""
    patch.setattr(graphs, "structure", lambda layer, block: ())


def plant_last_pack(patch: pytest.MonkeyPatch) -> None:
    """Gradients of a second pack replace those of the first."""

    def put(self: fixed.Adapters, found: fixed.Flat) -> None:
        for master, grad in zip(self.masters, found.parts, strict=True):
            master.grad = grad.clone()

    patch.setattr(fixed.Adapters, "add", put)


def plant_shared_result(patch: pytest.MonkeyPatch) -> None:
    """A block's result is not copied from where the next one's will be."""
    up = graphs.Play.up

    def planted(self: graphs.Play, *given: Any) -> Any:
        up(self, *given)
        return self._case.out

    patch.setattr(graphs.Play, "up", planted)


@pytest.mark.parametrize(
    "plant", [plant_old_weights, plant_old_arguments, plant_one_kind, plant_last_pack, plant_shared_result]
)
def test_a_fault_shows(
    plant: Callable[[pytest.MonkeyPatch], None], hybrid: tuple[Any, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store = hybrid
    plant(monkeypatch)
    config = options(torch.bfloat16, stream={"packs_per_visit": 2}, adapter={"targets": ["gate_proj"]})
    both = streaming.pair(made, store, config, lr=1e-2, recorder=tape.Recorder())
    try:
        assert differences(both, 3)
    except (blame.NotFinite, gradients.NothingLearned, RuntimeError):
        return  # what is computed with another's bytes need not be a number, or has another shape


def test_after_a_pass_that_was_broken_off_the_next_is_whole(
    hybrid: tuple[Any, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(RuntimeError):
        pass

    made, store = hybrid
    both = streaming.pair(made, store, options(torch.bfloat16), lr=1e-2, recorder=tape.Recorder())
    assert differences(both, 2) == []
    down = graphs.Play.down

    def third(self: graphs.Play, index: int, *given: Any) -> Any:
        if index == 1:
            raise Broken
        return down(self, index, *given)

    monkeypatch.setattr(graphs.Play, "down", third)
    with pytest.raises(Broken):
        streaming.updated(both, other_packs(0), 2, 1e-2)
    monkeypatch.setattr(graphs.Play, "down", down)
    for parameter in both.whole.parameters.values():
        parameter.grad = None
    assert differences(both, 2) == []


# What the driver says of them.


def test_the_driver_is_asked_again_after_an_update_that_recorded(
    hybrid: tuple[Any, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store = hybrid
    both = streaming.pair(made, store, options(torch.bfloat16), recorder=tape.Recorder())
    root, asked, says = both.root, [0], [GIB]

    def of_process(device: torch.device) -> int:
        asked[0] += 1
        return says[-1]

    def update(given: Sequence[Batch]) -> tuple[int, int]:
        """Recordings, and how often the driver had been asked."""
        step.update(both.stream, 0, 0.0, given)
        with monkeypatch.context() as patch:
            patch.setattr(root, "source", SimpleNamespace(device=torch.device("cuda", 0)))
            assert root.metrics(1.0)["stream_driver_bytes"] == says[-1]
        assert root.graphs is not None
        return root.graphs.made, asked[0]

    monkeypatch.setattr(readings, "of_process", of_process)
    root.limit = 2 * GIB
    found = [(-1, 0), *(update(packs(made, GROUPS[:1])) for _ in range(4))]
    steps = [(now[0] != before[0], now[1] - before[1]) for before, now in pairwise(found)]
    assert steps[0] == (True, 1)
    assert steps[-1] == (False, 0)
    assert all(times == recorded for recorded, times in steps)
    update(packs(made, GROUPS[1:]))  # its layouts' first pass, or part of it
    says.append(3 * GIB)
    with pytest.raises(UserError, match=r"stream\.budget_gib is 2, .* uses 3\.00 GiB .* more here than the 0\.84 GiB"):
        update(packs(made, GROUPS[1:]))


# Where there can be none.


def update_of(config: Any, made: Any, store: Store, **given: Any) -> tape.Recorder:
    recorder = tape.Recorder()
    both = streaming.pair(made, store, config, lr=1e-2, recorder=recorder, **given)
    require_equal(both, packs(made), updates=3)
    return recorder


@pytest.mark.parametrize("kept", [1, 2])
def test_more_layouts_than_recordings_are_kept_for(hybrid: tuple[Any, Store], kept: int) -> None:
    """Three layouts in turn: each is recorded anew, and used within its pass."""
    made, store = hybrid
    recorder = tape.Recorder()
    both = streaming.pair(
        made, store, options(torch.bfloat16, stream={"graph_layouts": kept}), lr=1e-2, recorder=recorder
    )
    counts = []
    for _ in range(3):
        require_equal(both, packs(made), updates=1)
        counts.append(len(recorder.tapes))
        assert both.root.graphs is not None
        assert len(both.root.graphs._cases) == kept
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0


def test_masks_that_are_drawn_on_the_host(hybrid: tuple[Any, Store]) -> None:
    made, store = hybrid
    dropping: dict[str, Any] = {"adapter": {"dropout": 0.3}}
    with pytest.raises(
        UserError, match=r"adapter\.dropout=0\.3 draws its masks on the host: set adapter\.masks=counted"
    ):
        update_of(options(torch.bfloat16, **dropping), made, store)
    assert update_of(options(torch.bfloat16, stream={"graphs": "auto"}, **dropping), made, store).tapes == []


def test_experts_are_chosen_as_they_compute(tmp_path: Path) -> None:
    made = streaming.built("qwen3_5_moe_text", torch.bfloat16)
    store = streaming.stored(made, tmp_path / "store", "plain")
    with pytest.raises(UserError, match=r"stream\.graphs=on: which experts compute"):
        update_of(options(torch.bfloat16), made, store)
    assert update_of(options(torch.bfloat16, stream={"graphs": "auto"}), made, store).tapes == []


def test_without_a_gpu_nothing_is_recorded(hybrid: tuple[Any, Store]) -> None:
    made, store = hybrid
    with pytest.raises(UserError, match=r"stream\.graphs=on: launches are recorded on CUDA, not on cpu"):
        streaming.pair(made, store, options(torch.bfloat16))
    both = streaming.pair(made, store, options(torch.bfloat16, stream={"graphs": "auto"}))
    assert both.root.graphs is None


def test_waiting_for_the_device_cannot_be_recorded() -> None:
    """The stand-in would say so."""
    with pytest.raises(RuntimeError, match="would wait for each other"):
        tape.Recorder().record(lambda: print(torch.ones(3).sum().item()))


def test_a_recording_takes_no_table_that_fla_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FLA remembers goes with the packs after it: a recording would read memory that is somebody else's."""
    utils = SimpleNamespace(FLA_DISABLE_TENSOR_CACHE=False)
    monkeypatch.setitem(sys.modules, "fla.utils", utils)  # type: ignore[arg-type]
    seen = []

    def broken_off() -> None:
        with graphs.nothing_remembered():
            seen.append(utils.FLA_DISABLE_TENSOR_CACHE)
            raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        broken_off()
    assert seen == [True]
    assert not utils.FLA_DISABLE_TENSOR_CACHE
    monkeypatch.delitem(sys.modules, "fla.utils")
    with graphs.nothing_remembered():
        assert "fla.utils" not in sys.modules
