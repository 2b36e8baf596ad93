"""Layer inputs that wait on the host: the same gradients, to the bit, with copies as late as a device may make them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from configs.schema import Config, MemoryConfig
from prefix_train import budget, model, offload, unit
from prefix_train.collate import Batch
from tests import batches, models
from tests.offloading import (
    CHUNK,
    ForgetfulCopier,
    Recording,
    Trained,
    backward,
    fifty_updates,
    needed,
    plant_chunks_too_early,
    plant_let_go,
    plant_no_wait,
    same,
    taken,
    trained,
)

COUNT = 7
LAYERS = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PINNED_CHUNK", CHUNK)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is given back is given back when the last reference goes, not when somebody collects cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def built(family: str = "qwen3_5_text", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return models.build(family, dtype)


def some_packs(base: PreTrainedModel) -> list[Batch]:
    """Of three sizes, the largest first."""
    return batches.batches(batches.make(base, COUNT), [[0, 1, 2, 3], [4], [5, 6]])


def run(base: PreTrainedModel, packs: Sequence[Batch], offloaded: str, **given: Any) -> Trained:
    return trained(copy.deepcopy(base), packs, offloaded, copier=ForgetfulCopier(), **given)


# The same gradients, to the bit.


def test_r17_offloading_changes_no_bit_in_fifty_updates(no_collector: None) -> None:
    base = built()
    copiers = {offloaded: {"copier": ForgetfulCopier()} for offloaded in ("none", "auto")}
    pairs = list(zip(*(fifty_updates(base, offloaded, **given) for offloaded, given in copiers.items()), strict=True))
    assert all(same(mine, theirs) for theirs, mine in pairs)
    assert not same(pairs[0][0], pairs[-1][0])


@pytest.mark.parametrize("offloaded", ["auto", "1", "2", "99"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "qwen3_5_moe_text"])
def test_r17_for_every_number_of_layers(family: str, offloaded: str) -> None:
    base = built(family)
    packs = some_packs(base)
    assert same(backward(run(base, packs, offloaded), packs), backward(run(base, packs, "none"), packs))


def test_r17_in_bfloat16_from_float32_masters() -> None:
    base = built(dtype=torch.bfloat16)
    packs = some_packs(base)
    assert same(backward(run(base, packs, "auto"), packs), backward(run(base, packs, "none"), packs))


@pytest.mark.parametrize(
    "plant",
    [
        plant_no_wait(ForgetfulCopier, "out"),
        plant_no_wait(ForgetfulCopier, "back"),
        plant_let_go,
        plant_chunks_too_early,
    ],
    ids=["out", "back", "let-go", "chunks"],
)
def test_r17_fails_without_fix(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    base = built()
    packs = some_packs(base)
    right = backward(run(base, packs, "none"), packs)
    plant(monkeypatch)
    assert not same(backward(run(base, packs, "auto"), packs), right)


# What waits where.


@pytest.mark.parametrize(("offloaded", "away"), [("auto", [0, 1, 2]), ("2", [0, 1]), ("none", [])])
def test_inputs_leave_the_device(offloaded: str, away: list[int], no_collector: None) -> None:
    """After the forward nobody holds the memory of an offloaded layer's input."""
    base = built()
    packs = some_packs(base)
    made = run(base, packs, offloaded)
    inputs: list[StorageWeakRef] = []
    for layer in made.stepper.root.anatomy.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    out = made.stepper.root(packs[0], draw="0")
    assert [place for place, storage in enumerate(inputs) if storage.expired()] == away
    if made.offload is not None:
        assert made.offload.pool.used == needed(made, packs[:1])
    out.loss.backward()
    del out
    if made.offload is not None:
        assert made.offload.pool.used == 0


def test_each_copy_has_a_layer_of_time() -> None:
    """An input leaves while its layer computes, and comes back while the layer after it does its backward."""
    base = built()
    packs = some_packs(base)[:1]
    copier = Recording()
    made = trained(base, packs, "auto", copier=copier)
    order: list[list[str]] = []
    for place, layer in enumerate(made.stepper.root.anatomy.layers):

        def begins(*_: Any, place: int = place) -> None:
            if copier.asked:  # else a tile of the same layer
                order.append([*copier.asked, f"layer {place}"])
                copier.asked.clear()

        layer.input_layernorm.register_forward_pre_hook(begins)
    backward(made, packs)
    assert order == [
        ["out", "layer 0"],
        ["out done", "out", "layer 1"],
        ["out done", "out", "layer 2"],
        ["out done", "layer 3"],
        ["back", "layer 3"],
        ["back done", "back", "layer 2"],
        ["back done", "back", "layer 1"],
        ["back done", "layer 0"],
    ]


def test_two_packs_may_wait_together_where_the_pool_holds_both(monkeypatch: pytest.MonkeyPatch) -> None:
    base = built()
    packs = some_packs(base)[:2]
    right = backward(run(base, packs, "none"), packs)
    small = run(base, packs, "auto")
    waiting = small.stepper.root(packs[0], draw="0").loss
    with pytest.raises(RuntimeError, match=r"memory.offload: .* pack.max_positions"):
        small.stepper.root(packs[1], draw="1")
    waiting.backward()
    assert small.offload is not None
    assert small.offload.pool.used == 0

    one, both = budget.pinned_bytes, needed(small, packs)
    monkeypatch.setattr(budget, "pinned_bytes", lambda *args, **kwargs: 2 * one(*args, **kwargs))
    large = run(base, packs, "auto")
    losses = [large.stepper.root(pack, draw=str(number)).loss for number, pack in enumerate(packs)]
    assert large.offload is not None
    assert large.offload.pool.used == both
    for loss in losses:
        loss.backward()
    assert same(taken(large.stepper), right)


def test_a_graph_that_is_kept_fetches_again(no_collector: None) -> None:
    base = built()
    packs = some_packs(base)[:1]
    made = run(base, packs, "auto")
    loss = made.stepper.root(packs[0], draw="0").loss
    loss.backward(retain_graph=True)
    loss.backward()
    twice = taken(made.stepper)
    once = backward(run(base, packs, "none"), packs)
    assert all(torch.equal(twice[name], 2 * once[name]) for name in once)
    del loss
    assert made.offload is not None
    assert made.offload.pool.used == 0


def test_nothing_is_offloaded_without_gradients() -> None:
    base = built()
    packs = some_packs(base)
    made = run(base, packs, "auto")
    with torch.no_grad():
        for pack in packs:
            made.stepper.root(pack, draw="0")
    assert made.offload is not None
    assert (made.offload.copied, made.offload.pool.peak) == (0, 0)


def test_random_states_are_left_alone() -> None:
    base = built()
    packs = some_packs(base)
    made = run(base, packs, "auto", rank=2, dropout=0.3)
    before = torch.get_rng_state()
    backward(made, packs)
    assert torch.equal(torch.get_rng_state(), before)


# When something goes wrong.


class Stumble(Exception):
    pass


def stumble(*_: Any) -> None:
    raise Stumble


@pytest.mark.parametrize("place", range(LAYERS))
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_pool_is_whole_after_an_exception(when: str, place: int, no_collector: None) -> None:
    base = built()
    packs = some_packs(base)
    made = run(base, packs, "auto")
    assert made.offload is not None
    layer = made.stepper.root.anatomy.layers[place]
    norm = layer.post_attention_layernorm
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


def test_an_input_that_is_written_to_while_it_is_copied_is_refused() -> None:
    base = built()
    packs = some_packs(base)
    made = run(base, packs, "auto")

    def write(module: Any, args: tuple[Tensor]) -> None:
        with torch.no_grad():
            args[0].add_(1)

    layer = made.stepper.root.anatomy.layers[1]
    handle = layer.input_layernorm.register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match="written to in place"):
        backward(made, packs)
    handle.remove()
    assert same(backward(made, packs), backward(run(base, packs, "none"), packs))


def test_an_input_that_autograd_does_not_save_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = built()
    packs = some_packs(base)
    made = run(base, packs, "auto")

    def other(run: Callable[..., Any], *args: Any, use_reentrant: bool, preserve_rng_state: bool, **kwargs: Any) -> Any:
        return run(args[0].clone(), *args[1:], **kwargs)

    monkeypatch.setattr(unit, "checkpoint", other)
    with pytest.raises(RuntimeError, match="was not saved through autograd"):
        backward(made, packs)


def test_layers_that_are_not_recomputed_are_not_offloaded() -> None:
    base = built()
    config = Config(memory=MemoryConfig(recompute=False, offload="auto"))
    root = model.Root(model.prepare(base, config), torch.float32, 3, images=False)
    with pytest.raises(ValueError, match="not recomputed"):
        offload.attach(root, config, torch.device("cpu"))
