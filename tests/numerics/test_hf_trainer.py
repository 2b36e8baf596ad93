"""transformers' Trainer and a loop under Accelerate, on packs, against training each example alone in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from configs.errors import UserError
from prefix_train import collate_packs, pack_examples, train_packs
from prefix_train.hf_trainer import PACK_ARGUMENTS, REFUSALS
from prefix_train.packs import PackInputs, Packs
from tests import batches, lives, models, oracle, own_loops, trainer_ranks

Run = Callable[[int, Path, str, int, int], None]

RUNS: dict[str, Run] = {
    "trainer": trainer_ranks.trained_by_trainer,
    "accelerate": trainer_ranks.trained_under_accelerate,
}


def run(work: Run, folder: Path, kind: str, ranks: int, per_rank: int) -> list[dict[str, Tensor]]:
    """Each rank's parameters and losses; every rank in a process of its own."""
    for number, process in enumerate(
        started := lives.start(work, ranks, folder, kind, ranks, per_rank, environment={})
    ):
        process.join(160)
        assert process.exitcode == 0, f"rank {number}: {process.exitcode}"
    assert len(started) == ranks
    return [load_file(folder / f"{rank}.safetensors") for rank in range(ranks)]


@pytest.mark.parametrize("name", sorted(RUNS))
@pytest.mark.parametrize(
    ("kind", "ranks", "per_rank"),
    [
        ("all", 1, 1),
        ("adapter", 1, 3),
        ("all", 2, 3),
        ("adapter", 2, 1),
    ],
)
def test_other_trainers_train_packs_as_each_example_alone(
    name: str, kind: str, ranks: int, per_rank: int, tmp_path: Path
) -> None:
    found = run(RUNS[name], tmp_path, kind, ranks, per_rank)
    with oracle.float64():
        model, base = trainer_ranks.built(kind)
        examples, packs = trainer_ranks.packs_of(base, ranks, per_rank)
        assert packs.positions < packs.logical
        assert any(not len(pack["targets"].ids) for pack in packs) == (per_rank == 3)
        before = own_loops.trained(model)
        losses = own_loops.train_alone(model, base, examples, packs)
        if name == "trainer":
            losses.append(float(oracle.run(base, batches.alone(examples)).loss))
    alone = own_loops.trained(model)
    for rank in found:
        assert rank.pop("losses").tolist() == pytest.approx(losses, rel=1e-8)
        assert own_loops.moved_apart(rank, alone, before) < 1e-6


def test_fails_without_the_weights_of_the_whole_update(tmp_path: Path) -> None:
    """The fault: each pack's loss is the mean over its own examples."""
    with oracle.float64():
        model, base = trainer_ranks.built("all")
        examples, packs = trainer_ranks.packs_of(base, 1, 3)
        before = own_loops.trained(model)
        other = copy.deepcopy(model)
        with train_packs(other):
            one = trainer_ranks.trainer(other, tmp_path, packs, max_steps=1)
            one.data_collator = weighted_by_itself
            one.train()
        own_loops.train_alone(model, base, examples, packs, updates=1)
    assert own_loops.moved_apart(own_loops.trained(other), own_loops.trained(model), before) > 0.05


def weighted_by_itself(items: list[PackInputs]) -> PackInputs:
    pack = collate_packs(items)
    if len(pack["targets"].weights):
        pack["targets"].weights /= pack["targets"].weights.sum()
    return pack


def trained_until(folder: Path, stop: int, resume: bool) -> tuple[int, dict[str, Tensor]]:
    """(updates, parameters) of a run that writes a checkpoint every third update and ends after `stop`; -1: never."""
    model, base = trainer_ranks.built("adapter")
    _, packs = trainer_ranks.packs_of(base, 1, 2)
    with train_packs(model):
        one = trainer_ranks.trainer(model, folder, packs, save_strategy="steps", save_steps=3, max_steps=stop)
        one.train(resume_from_checkpoint=resume or None)
    return one.state.global_step, own_loops.trained(model)


def test_a_run_goes_on_where_its_checkpoint_was_written(tmp_path: Path) -> None:
    updates, unbroken = trained_until(tmp_path / "unbroken", -1, False)
    assert updates > 3
    stopped, halfway = trained_until(tmp_path / "broken", 3, False)
    gone_on, resumed = trained_until(tmp_path / "broken", -1, True)
    assert (stopped, gone_on) == (3, updates)
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)
    assert not any(torch.equal(halfway[name], unbroken[name]) for name in unbroken)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return models.build("llama", torch.float32)


def packs_for(model: Any, **more: Any) -> Packs:
    rows = own_loops.rows_of(batches.make(model, 4))
    return pack_examples(rows, **{"max_positions": 200, "packs_per_update": 1, **more})


BAD: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 8,
    "train_sampling_strategy": "group_by_length",
    "remove_unused_columns": True,
    "label_names": None,
    "bf16": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
}


@pytest.mark.parametrize("option", BAD)
def test_an_option_that_is_not_exact_is_refused_by_name(option: str, model: nn.Module, tmp_path: Path) -> None:
    packs = packs_for(model)
    with train_packs(model), pytest.raises(UserError, match=rf"^TrainingArguments: {option}="):
        trainer_ranks.trainer(model, tmp_path, packs, **{option: BAD[option]})


def test_what_cannot_be_asked_for_here_is_refused_too() -> None:
    """These need a GPU, a second one, or a package: the rule alone is tried."""
    others = {
        "n_gpu": 2,
        "fp16": True,
        "deepspeed": {"zero_optimization": {}},
        "fsdp": True,
        "parallelism_config": object(),
    }
    assert {each.option for each in REFUSALS} == {*BAD, *others}
    for each in REFUSALS:
        assert each.refused({**BAD, **others}[each.option])
        if each.option in PACK_ARGUMENTS:
            assert not each.refused(PACK_ARGUMENTS[each.option])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
            "use_reentrant",
        ),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config.dispatch_batches"),
    ],
)
def test_loading_and_recomputation_that_are_not_exact(
    more: dict[str, Any], message: str, model: nn.Module, tmp_path: Path
) -> None:
    with train_packs(model), pytest.raises(UserError, match=message):
        trainer_ranks.trainer(model, tmp_path, packs_for(model), **more)


def test_a_trainer_outside_the_context_is_refused(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"LlamaForCausalLM does not take packs: .* within train_packs\(model\)"):
        trainer_ranks.trainer(model, tmp_path, packs_for(model))


def test_a_compiled_model_is_refused_as_one(model: nn.Module, tmp_path: Path) -> None:
    with train_packs(model), pytest.raises(UserError, match=r"compiled with torch.compile: .*; give the model itself"):
        trainer_ranks.trainer(torch.compile(model, backend="eager"), tmp_path, packs_for(model))


def test_packs_that_do_not_fit_the_run_are_refused(model: nn.Module, tmp_path: Path) -> None:
    packs = packs_for(model)
    with train_packs(model):
        more = trainer_ranks.trainer(model, tmp_path, packs, gradient_accumulation_steps=2)
        with pytest.raises(
            UserError, match=r"each process has 1 pack in an update; write gradient_acc.*packs.per_rank"
        ):
            more.train()
        for_two = packs_for(model, packs_per_update=2, ranks=2)
        with pytest.raises(UserError, match="train_dataset was planned for 2 ranks, not 1"):
            trainer_ranks.trainer(model, tmp_path, for_two).train()
        with pytest.raises(UserError, match=r"eval_dataset was planned for 2 ranks, not 1; write pack_heldout"):
            trainer_ranks.trainer(model, tmp_path, packs, heldout=for_two).evaluate()
        rows = [dict(pack) for pack in packs]
        plain = trainer_ranks.trainer(model, tmp_path, packs)
        plain.train_dataset = rows
        with pytest.raises(UserError, match="train_dataset is a list; give what pack_examples returns"):
            plain.train()


def test_recomputation_under_trainer_changes_nothing(tmp_path: Path) -> None:
    found = []
    for recompute in (False, True):
        model, base = trainer_ranks.built("adapter")
        _, packs = trainer_ranks.packs_of(base, 1, 1)
        with train_packs(model):
            trainer_ranks.trainer(model, tmp_path, packs, max_steps=2, activation_checkpointing=recompute).train()
        found.append(own_loops.trained(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_several_packs_are_no_batch(model: nn.Module) -> None:
    loader: Any = DataLoader(packs_for(model, packs_per_update=2), batch_size=2, collate_fn=collate_packs)
    with pytest.raises(UserError, match="a batch of 2 packs"):
        next(iter(loader))


def test_packs_come_from_worker_processes_too(model: nn.Module) -> None:
    packs = packs_for(model, packs_per_update=2)
    loader: Any = DataLoader(packs, batch_size=1, collate_fn=collate_packs, num_workers=1)
    with train_packs(model), torch.no_grad():
        losses = [float(model(**pack).loss) for pack in loader]
        assert losses == [float(model(**pack).loss) for pack in packs]
