"""Layers that are recomputed in two halves: the same gradients, to the bit, wherever their middles wait."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from configs import compose
from configs.errors import UserError
from prefix_train import budget, dropout, offload, tiny, unit
from prefix_train.bench import random_examples, star
from prefix_train.collate import collate, entry_weights
from prefix_train.copies import Copy, LateCopier
from tests import models
from tests.live_bytes import LiveBytes
from tests.middles import learned, run, some_packs
from tests.offloading import CHUNK, ForgetfulCopier, Recording, backward, fifty_updates, same, taken


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PINNED_CHUNK", CHUNK)
    monkeypatch.setattr(dropout, "BLOCK", 4)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is given back is given back when the last reference goes, not when somebody collects cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# The same gradients, to the bit.


@pytest.mark.parametrize("keep", ["none", "auto"])
@pytest.mark.parametrize("middle", ["auto", "3"])
@pytest.mark.parametrize("offloaded", ["auto", "2"])
@pytest.mark.parametrize("family", ["olmo_hybrid", "qwen3_5_text"])
def test_wherever_middles_wait(family: str, offloaded: str, middle: str, keep: str) -> None:
    """Copies as late as a device may make them; the pool holds what waits and no chunk more."""
    base = models.build(family)
    packs = some_packs(base)
    right = backward(run(base, packs, "none", **learned(family)), packs)
    made = run(base, packs, middle, offloaded, keep=keep, **learned(family))
    assert same(backward(made, packs), right)
    layers = made.stepper.root.anatomy.layers
    kept = [unit.keeps_middle(layer) for layer in layers]
    assert kept == [index >= len(layers) - (4 if middle == "auto" else int(middle)) for index in range(len(layers))]
    assert made.offload is not None
    assert made.offload.middles == sum(kept[: made.offload.count])
    assert made.offload.pool.used == 0
    assert made.offload.pool.peak == made.offload.pool.size


def test_in_bfloat16_from_float32_masters() -> None:
    base = models.build("qwen3_5_text", torch.bfloat16)
    packs = some_packs(base)
    for given in ({}, learned("qwen3_5_text")):
        right = backward(run(base, packs, "none", **given), packs)
        assert same(backward(run(base, packs, "auto", "auto", **given), packs), right)


@pytest.mark.slow
def test_in_fifty_updates() -> None:
    """`fifty_updates` counts the copies' bytes."""
    base = models.build("qwen3_5_text")
    given = {"targets": learned("qwen3_5_text")["targets"]}
    kept = fifty_updates(base, "auto", copier=ForgetfulCopier(), middle="auto", keep="auto", **given)
    pairs = list(zip(fifty_updates(base, "none", **given), kept, strict=True))
    assert all(same(mine, theirs) for theirs, mine in pairs)
    assert not same(pairs[0][0], pairs[-1][0])


# Copies.


def given_away(patch: pytest.MonkeyPatch, middles: WeakSet[offload.Stored]) -> None:
    """The fault: its chunks are free while it waits there."""
    store = offload.Stored.store

    def planted(self: offload.Stored, source: Tensor) -> Copy:
        copy = store(self, source)
        if self in middles:
            self._offload.pool.give(self._chunks)
        return copy

    patch.setattr(offload.Stored, "store", planted)


def not_waited_for(patch: pytest.MonkeyPatch, middles: WeakSet[offload.Stored]) -> None:
    """The fault: it is read while it comes back."""
    tensor = offload.Stored.tensor

    def planted(self: offload.Stored) -> Tensor:
        if self not in middles:
            return tensor(self)
        self.fetch()
        assert self._on_its_way is not None
        return self._on_its_way[0]

    patch.setattr(offload.Stored, "tensor", planted)


@pytest.mark.parametrize("fault", [given_away, not_waited_for])
def test_a_middle_that_waits_too_little_shows(
    fault: Callable[[pytest.MonkeyPatch, WeakSet[offload.Stored]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = models.build("qwen3_5_text")
    packs = some_packs(base)
    right = backward(run(base, packs, "none"), packs)
    init, middle = offload.Stored.__init__, offload.Offload.middle
    middles: WeakSet[offload.Stored] = WeakSet()
    within: list[bool] = []

    def made(self: offload.Stored, *given: Any) -> None:
        init(self, *given)
        if within:
            middles.add(self)

    def entered(self: offload.Offload, index: int, hidden: Tensor) -> Any:
        within.append(True)
        inner = middle(self, index, hidden)
        stack = ExitStack()
        stack.enter_context(inner)
        within.clear()
        return stack

    monkeypatch.setattr(offload.Stored, "__init__", made)
    monkeypatch.setattr(offload.Offload, "middle", entered)
    assert same(backward(run(base, packs, "auto", "auto"), packs), right)
    fault(monkeypatch, middles)
    assert not same(backward(run(base, packs, "auto", "auto"), packs), right)


def test_each_copy_has_half_a_layer_of_time() -> None:
    """A layer's input comes back during its feed-forward's backward, the middle before it during its mixer's."""
    base = models.build("qwen3_5_text")
    packs = some_packs(base)[:1]
    copier = Recording()
    made = run(base, packs, "auto", "auto", copier=copier, tile_rows=0)
    order: list[list[str]] = []
    for place, layer in enumerate(made.stepper.root.anatomy.layers):
        for norm, half in ((layer.input_layernorm, "mixer"), (layer.post_attention_layernorm, "feed-forward")):

            def begins(*_: Any, said: str = f"{half} {place}") -> None:
                order.append([*copier.asked, said])
                copier.asked.clear()

            norm.register_forward_pre_hook(begins)
    backward(made, packs)
    assert order == [
        ["out", "mixer 0"],
        ["out", "feed-forward 0"],
        *(["out done", "out done", "out", "mixer 1"], ["out", "feed-forward 1"]),
        *(["out done", "out done", "out", "mixer 2"], ["out", "feed-forward 2"]),
        *(["out done", "out done", "mixer 3"], ["feed-forward 3"]),
        *(["feed-forward 3"], ["back", "mixer 3"]),
        *(["back done", "back", "feed-forward 2"], ["back done", "back", "mixer 2"]),
        *(["back done", "back", "feed-forward 1"], ["back done", "back", "mixer 1"]),
        *(["back done", "back", "feed-forward 0"], ["back done", "mixer 0"]),
    ]


def test_middles_leave_the_device(no_collector: None) -> None:
    """After the forward nobody holds the memory of a middle that waits on the host."""
    base = models.build("qwen3_5_text")
    packs = some_packs(base)
    made = run(base, packs, "auto", "2")
    middles: list[StorageWeakRef] = []
    for layer in made.stepper.root.anatomy.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, args: middles.append(StorageWeakRef(args[0].untyped_storage()))
        )
    out = made.stepper.root(packs[0], draw="0")
    assert [storage.expired() for storage in middles[:4]] == [True, True, False, False]
    assert made.offload is not None
    assert made.offload.pool.used == made.offload.pool.size
    out.loss.backward()
    del out
    assert made.offload.pool.used == 0
    assert all(storage.expired() for storage in middles)


# Graphs that are kept, dropped, or broken off.


@pytest.mark.parametrize("offloaded", ["none", "auto"])
def test_a_graph_that_is_kept_and_one_that_is_dropped(offloaded: str, no_collector: None) -> None:
    base = models.build("qwen3_5_text")
    packs = some_packs(base)[:1]
    once = backward(run(base, packs, "none", keep="auto"), packs)
    made = run(base, packs, "auto", offloaded, keep="auto")
    loss = made.stepper.root(packs[0], draw="0").loss
    loss.backward(retain_graph=True)
    loss.backward()
    twice = taken(made.stepper)
    assert all(torch.equal(twice[name], 2 * once[name]) for name in once)
    del loss
    made.stepper.root(packs[0], draw="0")
    if made.offload is not None:
        assert made.offload.pool.used == 0


def test_nothing_is_kept_without_gradients() -> None:
    base = models.build("qwen3_5_text")
    packs = some_packs(base)[:1]
    made = run(base, packs, "auto", "auto")
    with torch.no_grad():
        made.stepper.root(packs[0], draw="0")
    assert made.offload is not None
    assert (made.offload.copied, made.offload.pool.peak) == (0, 0)


class Stumble(Exception):
    pass


def stumble(*_: Any) -> None:
    raise Stumble


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_pool_is_whole_after_an_exception(when: str, place: int, no_collector: None) -> None:
    base = models.build("qwen3_5_text")
    packs = some_packs(base)
    made = run(base, packs, "auto", "auto")
    assert made.offload is not None
    norm: Any = made.stepper.root.anatomy.layers[place].post_attention_layernorm
    handle = (
        norm.register_forward_pre_hook(stumble)
        if when == "forward"
        else norm.register_forward_hook(lambda module, args, output: output.register_hook(stumble) and None)
    )
    with pytest.raises(Stumble):
        backward(made, packs)
    handle.remove()
    gc.collect()  # the exception's own frames
    assert made.offload.pool.used == 0
    assert same(backward(made, packs), backward(run(base, packs, "none"), packs))


def test_a_middle_that_is_written_to_while_it_is_copied_is_refused() -> None:
    base = models.build("qwen3_5_text")
    packs = some_packs(base)
    made = run(base, packs, "auto", "auto")

    def write(module: Any, args: tuple[Tensor]) -> None:
        with torch.no_grad():
            args[0].add_(1)

    made.stepper.root.anatomy.layers[1].post_attention_layernorm.register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match="written to in place"):
        backward(made, packs)


# What is alive.

SIZES = {
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "vocab_size": 1024,
}
PREFIX, CONTINUATIONS, LENGTH = 512, 4, 192


@pytest.mark.parametrize(("width", "tile_rows", "saved"), [(896, 0, 4.0), (64, 256, -0.02)])
def test_the_peak_does_not_grow(width: int, tile_rows: int, saved: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """width: of a feed-forward that needs the most, or the least. saved: hidden states that the peak is lower by; where
    it is the mixer's, the feed-forward's adapters, few as they are, have their gradients by then."""
    monkeypatch.setattr(dropout, "BLOCK", 256)
    base = tiny.build_model({**SIZES, "intermediate_size": width}, 0, torch.float32)
    examples = random_examples(PREFIX, CONTINUATIONS, LENGTH, SIZES["vocab_size"], 0)  # type: ignore[arg-type]
    weights = entry_weights("example", [int(one.target.sum()) for one in examples])
    packs = [collate(star(examples, PREFIX), examples, weights)]
    given = {"rank": 8, "dropout": 0.1, "targets": ["q_proj", "o_proj", "out_proj", "down_proj"]}
    peaks = {}
    for middle in ("none", "auto"):
        made = run(base, packs, middle, "auto", copier=LateCopier(), tile_rows=tile_rows, **given)
        with LiveBytes() as live:
            made.stepper.root(packs[0], draw="0").loss.backward()
        assert made.offload is not None
        peaks[middle] = live.peak - made.offload.pool.size  # the pool is the host's, whole from its first copy on
    one = packs[0].positions * 256 * 4
    assert peaks["none"] - peaks["auto"] >= saved * one


def test_mistakes_are_named() -> None:
    for overrides, wrong in (
        (["memory.keep_middle=some"], "give auto, none or a number"),
        (["memory.keep_middle=auto", "memory.recompute=false"], "everything is kept"),
    ):
        with pytest.raises(UserError, match=wrong):
            compose.load(Path(__file__).parents[1] / "data" / "tiny-geometry.yaml", overrides)
