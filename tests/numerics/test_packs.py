"""Packs of rows in a plain loop: the loss within the model's forward, and updates equal to each example's alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import prefix_train
from configs.errors import UserError
from prefix_train import pack_examples, pack_forward, pack_heldout, train_packs
from prefix_train.families import NotExact
from prefix_train.packs import PackInputs
from tests import accelerated, batches, models, oracle, own_loops

COUNT = 11


def built(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """Drawn outside the float64 mode, which would draw other numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return models.build(family, dtype)
    finally:
        torch.set_default_dtype(before)


def with_adapters(base: Any, dropout: float = 0.0) -> nn.Module:
    """Adapters in the base's own dtype whose second factors are not zero."""
    adapted = get_peft_model(
        base,
        LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "gate_proj", "down_proj"]),
        autocast_adapter_dtype=False,
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return adapted


def plain_loop(model: nn.Module, packs: Any) -> list[float]:
    """What docs/guides/plain-loop.md shows."""
    optimizer = own_loops.adamw([each for each in model.parameters() if each.requires_grad])
    losses = []
    with train_packs(model):
        for update in packs.updates():
            total = 0.0
            for pack in update:
                loss = model(**pack).loss / packs.per_update
                loss.backward()
                total += float(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), own_loops.CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    return losses


@pytest.mark.parametrize("family", ["qwen3_5_text", "llama"])
@pytest.mark.parametrize("adapter", [False, True], ids=["all", "adapter"])
def test_a_plain_loop_over_packs_trains_as_each_example_alone(family: str, adapter: bool) -> None:
    with oracle.float64():
        base = built(family)
        examples = batches.make(base, COUNT)
        packs = pack_examples(own_loops.rows_of(examples), max_positions=45, packs_per_update=3, epochs=2, min_shared=4)
        assert packs.positions < packs.logical
        assert len(packs.members) > 3
        models_ = [with_adapters(each) if adapter else each for each in (base, copy.deepcopy(base))]
        before = own_loops.trained(models_[0])
        losses = plain_loop(models_[0], packs)
        alone = models_[1].get_base_model() if adapter else models_[1]
        assert losses == pytest.approx(own_loops.train_alone(models_[1], alone, examples, packs), rel=1e-9)
        mine, theirs = own_loops.trained(models_[0]), own_loops.trained(models_[1])
        assert own_loops.moved_apart(mine, theirs, before) < 1e-6


def test_every_update_has_as_many_packs_and_a_mean_of_their_losses() -> None:
    base = built("llama", torch.float32)
    examples = batches.make(base, COUNT)
    rows = own_loops.rows_of(examples)
    packs = pack_examples(rows, max_positions=45, packs_per_update=4, ranks=2, min_shared=4)
    assert (packs.per_rank, packs.per_update, len(packs)) == (2, 4, 4 * len(packs.members))
    assert sorted(member for members in packs.members for member in members) == list(range(COUNT))
    for number, members in enumerate(packs.members):
        of_update = packs[number * 4 : number * 4 + 4]
        by_rank = [list(packs.updates(rank))[number] for rank in range(2)]
        order = [by_rank[0][0], by_rank[1][0], by_rank[0][1], by_rank[1][1]]
        assert [each["input_ids"].tolist() for each in of_update] == [each["input_ids"].tolist() for each in order]
        weights = sum(float(each["targets"].weights.sum()) for each in of_update) / packs.per_update
        assert weights == pytest.approx(1.0, abs=1e-12)
        assert members
    with pytest.raises(IndexError):
        packs[len(packs)]


def test_heldout_examples_are_one_update() -> None:
    base = built("llama", torch.float32).eval()
    examples = batches.make(base, COUNT)
    packs = pack_heldout(own_loops.rows_of(examples), max_positions=70, ranks=2, min_shared=4)
    assert len(packs.members) == 1
    with torch.no_grad(), train_packs(base):
        losses = [float(base(**pack).loss) for pack in packs]
    alone = oracle.run(base, batches.alone(examples))
    assert sum(losses) / len(losses) == pytest.approx(float(alone.loss), rel=1e-5)


def test_by_examples_per_update_and_by_tokens() -> None:
    base = built("llama", torch.float32)
    examples = batches.make(base, COUNT)
    rows = own_loops.rows_of(examples)
    packs = pack_examples(rows, max_positions=80, examples_per_update=4, weighting="token", min_shared=4)
    assert [len(members) for members in packs.members] == [4, 4, 3]
    for number, members in enumerate(packs.members):
        targets = sum(int(examples[member].target.sum()) for member in members)
        weights = torch.cat([each["targets"].weights for each in list(packs.updates())[number]])
        assert float(weights.sum()) / packs.per_update == pytest.approx(1.0)
        assert float(weights.min()) == pytest.approx(packs.per_update / targets)


def test_rendered_examples_with_images_train_too() -> None:
    with oracle.float64():
        base = built("qwen3_5")
        examples = batches.make(base, COUNT, images=True)
        packs = pack_examples(examples, max_positions=200, packs_per_update=2, min_shared=4)
        alone = oracle.run(base, batches.alone([examples[member] for member in packs.members[0]]), models.IMAGE)
        with train_packs(base):
            for pack in next(packs.updates()):
                if "pixel_values" in pack:
                    pack["pixel_values"] = pack["pixel_values"].double()
                (base(**pack).loss / packs.per_update).backward()
        found = oracle.gradients(base)
        assert found.keys() == alone.gradients.keys()
        for name, gradient in alone.gradients.items():
            assert (found[name] - gradient).norm() <= 1e-9 * max(gradient.norm(), 1e-6), name


def test_leaving_restores_the_model_and_without_targets_it_gives_logits() -> None:
    model = built("qwen3_5_text", torch.float32)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    pack = pack_examples(own_loops.rows_of(batches.make(model, 4)), max_positions=200, packs_per_update=1)[0]
    with train_packs(model):
        without = {name: value for name, value in pack.items() if name != "targets"}
        logits = model(**without).logits
        loss = model(**pack).loss
    targets = pack["targets"]
    each = nn.functional.cross_entropy(logits[0, targets.rows], targets.ids, reduction="none")
    assert float(loss.detach()) == pytest.approx(float((each.double() * targets.weights).sum()), rel=1e-5)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"labels": torch.zeros(1, 3, dtype=torch.int64)}, "labels: they would be shifted"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "takes input_ids"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask: a pack has no padding"),
    ],
)
def test_what_a_forward_with_targets_does_not_take(more: dict[str, Any], message: str) -> None:
    model = built("llama", torch.float32)
    pack = pack_examples(own_loops.rows_of(batches.make(model, 4)), max_positions=200, packs_per_update=1)[0]
    with train_packs(model), pytest.raises((NotExact, TypeError), match=message):
        model(**{**pack, **more})


def test_an_adapter_on_the_head_is_refused() -> None:
    model = get_peft_model(built("llama", torch.float32), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(NotExact, match="no linear language head; call the model without targets"), train_packs(model):
        pass
    with prefix_train.shared_prefix(model):
        pass


def test_a_wrapped_model_is_refused() -> None:
    wrapped = nn.Sequential(built("llama", torch.float32))
    with pytest.raises(NotExact, match="enter train_packs before the model is wrapped"), train_packs(wrapped):
        pass


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2, 3], "labels": [-100, 2]}, "row 1: 3 input_ids, but 2 labels"),
        (
            {"input_ids": [1, 2, 3], "labels": [-100, 3, -100]},
            r"row 1: labels\[1\] is 3, input_ids\[1\] is 2: .*not shifted",
        ),
        ({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}, "row 1: no label besides -100"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, "row 1: its first token has a label"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 0]}, "row 1: attention_mask holds zeros"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "pixel_values": 0}, "row 1: pixel_values: a row has input_ids"),
        ({"input_ids": [1, 2]}, "row 1: no labels"),
        ({"input_ids": [[1, 2]], "labels": [[-100, 2]]}, r"row 1: input_ids is int64 of shape \(1, 2\)"),
        ({"input_ids": [1, 2] * 9, "labels": [-100, 2] * 9}, "row 1: 18 tokens do not fit into pack.max_positions=12"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused_by_its_number(row: dict[str, Any], message: str) -> None:
    good = {"input_ids": [1, 2, 4], "labels": [-100, -100, 4], "attention_mask": [1, 1, 1]}
    with pytest.raises(UserError, match=message):
        pack_examples([good, row], max_positions=12, packs_per_update=1)
    with pytest.raises(UserError, match="no rows"):
        pack_examples([], max_positions=12, packs_per_update=1)
    with pytest.raises(UserError, match="give one of"):
        pack_examples([good], max_positions=12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_by_transformers_changes_no_gradient(dropout: float) -> None:
    """Its checkpoint keeps the random state, so that a recomputed layer drops what it dropped before."""
    found = []
    for recompute in (False, True):
        model = with_adapters(built("qwen3_5_text", torch.float32), dropout)
        if recompute:
            model.activation_checkpointing_enable()
        rows = own_loops.rows_of(batches.make(model.get_base_model(), COUNT))
        pack: PackInputs = pack_examples(rows, max_positions=400, packs_per_update=1)[0]
        torch.manual_seed(3)
        with train_packs(model):
            model(**pack).loss.backward()
        found.append(oracle.gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def forgetful(dropout: float) -> tuple[nn.Module, PackInputs]:
    """A model whose layers Accelerate's FSDP2 would have wrapped for recomputation, and a pack."""
    model = with_adapters(built("qwen3_5_text", torch.float32), dropout)
    rows = own_loops.rows_of(batches.make(model.get_base_model(), COUNT))
    return model, pack_examples(rows, max_positions=400, packs_per_update=1)[0]


def wrap(model: Any) -> None:
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)


def test_r29_recomputation_with_other_masks_is_refused() -> None:
    model, pack = forgetful(0.3)
    with train_packs(model):
        wrap(model)
        with pytest.raises(
            NotExact, match=r"model.layers.0.mlp.gate_proj.lora_dropout.default: dropout 0.3 in a layer"
        ):
            model(**pack)
        with torch.no_grad():
            model(**pack)
        model.eval()
        model(**pack)
    model, pack = forgetful(0.3)
    with train_packs(model):
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        with pytest.raises(NotExact, match="preserve_rng_state=False"):
            model(**pack)


def test_r29_without_dropout_the_wrapper_is_exact() -> None:
    assert gradients_with_and_without_wrapper(0.0) == 0


def test_r29_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: layers are recomputed with fresh masks."""
    monkeypatch.setattr(pack_forward, "refuse_other_masks", lambda model: None)
    assert gradients_with_and_without_wrapper(0.3) > 0.3


def gradients_with_and_without_wrapper(dropout: float) -> float:
    """Largest relative difference of a tensor."""
    found = []
    for wrapped in (False, True):
        model, pack = forgetful(dropout)
        with train_packs(model):
            if wrapped:
                wrap(model)
            torch.manual_seed(3)
            model(**pack).loss.backward()
        found.append(accelerated.gradients(model.named_parameters()))
    return accelerated.worst(found[1], found[0])
