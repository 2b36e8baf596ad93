"""transformers' Trainer on packs: what it is to be told, and a callback that refuses what would not be exact.

Trainer divides each loss by the packs of a rank's update, and data parallelism averages over ranks: together the mean
over the packs of an update, which is how `Packs` weights them. So nothing of Trainer is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from transformers import TrainerCallback

from configs.errors import UserError
from configs.wording import counted
from prefix_train.pack_forward import takes_targets
from prefix_train.packs import Packs

PACK_ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "num_train_epochs": 1,
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "label_names": ["targets"],
}
"""For `TrainingArguments(**PACK_ARGUMENTS, ...)`, besides `gradient_accumulation_steps=packs.per_rank`. The packs were
planned for all epochs of the run: Trainer goes through them once."""


@dataclass(frozen=True)
class Refusal:
    """An option of TrainingArguments: when it is refused, and why or what to write instead."""

    option: str
    refused: Callable[[Any], bool]
    advice: str


def _wanted(option: str, why: str) -> Refusal:
    wanted = PACK_ARGUMENTS[option]
    return Refusal(option, lambda value: value != wanted, f"{why}; write {option}={wanted!r}")


_CAST = "autocast changes the dtype of recurrent states; load the model in bfloat16 and leave this off"
_UNTESTED = "it has not been tested with packs"

REFUSALS = (
    _wanted("per_device_train_batch_size", "a pack is a batch already"),
    _wanted("per_device_eval_batch_size", "a pack is a batch already"),
    _wanted("train_sampling_strategy", "packs have an order: those of an update stand together"),
    _wanted("remove_unused_columns", "it would take the layout out of a pack"),
    _wanted("label_names", "without it an evaluation computes no loss"),
    Refusal("n_gpu", lambda value: value > 1, "DataParallel splits a batch over GPUs; start one process per GPU"),
    Refusal("bf16", bool, _CAST),
    Refusal("fp16", bool, _CAST),
    Refusal("bf16_full_eval", bool, "it would cast the model in an evaluation; load it in bfloat16"),
    Refusal("fp16_full_eval", bool, "it would cast the model in an evaluation; load it in bfloat16"),
    Refusal("label_smoothing_factor", bool, "a pack's loss is the cross-entropy of its targets"),
    Refusal("neftune_noise_alpha", bool, "noise on a shared prefix is not that of each example alone"),
    Refusal("torch_compile", bool, _UNTESTED),
    Refusal("use_liger_kernel", bool, "it replaces the forwards that a pack goes through"),
    Refusal("auto_find_batch_size", bool, "a batch is one pack; plan them with a smaller max_positions"),
    Refusal("deepspeed", bool, _UNTESTED),
    Refusal("fsdp", bool, f"{_UNTESTED}; docs/guides/accelerate.md shards with Accelerate"),
    Refusal("parallelism_config", bool, "a pack is computed in one piece"),
)


class PackCallback(TrainerCallback):
    """Refuses, by name, what would not train packs exactly; give it to a Trainer made within `train_packs(model)`.

    Raises UserError as the Trainer is made for an option, as training begins for a dataset that does not fit the
    processes and the accumulation, and in an evaluation for one that is no `pack_heldout` for these processes.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look at the options, and at the model."""
        for each in REFUSALS:
            if each.refused(value := getattr(args, each.option)):
                raise UserError(f"TrainingArguments: {each.option}={value!r}: {each.advice}")
        _refuse_checkpointing(args)
        for option in ("split_batches", "dispatch_batches"):
            if getattr(args.accelerator_config, option):
                raise UserError(f"TrainingArguments: accelerator_config.{option}: each process loads its own packs")
        model: nn.Module = given["model"]
        if isinstance(model, OptimizedModule):
            raise UserError(f"the model has been compiled with torch.compile: {_UNTESTED}; give the model itself")
        if not takes_targets(model):
            raise UserError(
                f"{type(model).__name__} does not take packs: make the Trainer, and train, within train_packs(model)"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look at the packs."""
        packs = _packs(given["train_dataloader"], "train_dataset", "pack_examples", args.world_size)
        if packs.per_rank != args.gradient_accumulation_steps:
            raise UserError(
                f"TrainingArguments: gradient_accumulation_steps={args.gradient_accumulation_steps}: each process has "
                f"{counted(packs.per_rank, 'pack')} in an update; write gradient_accumulation_steps=packs.per_rank"
            )

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look at the packs of an evaluation."""
        _packs(given["eval_dataloader"], "eval_dataset", "pack_heldout", args.world_size)


def _packs(loader: Any, name: str, made_by: str, world: int) -> Packs:
    packs = loader.dataset
    if not isinstance(packs, Packs):
        raise UserError(f"{name} is a {type(packs).__name__}; give what {made_by} returns")
    if packs.ranks != world:
        raise UserError(
            f"{name} was planned for {counted(packs.ranks, 'rank')}, not {world}; write {made_by}(ranks={world})"
        )
    return packs


def _refuse_checkpointing(args: Any) -> None:
    if not args.activation_checkpointing:
        return
    more = args.activation_checkpointing_kwargs or {"use_reentrant": False}
    if more.get("use_reentrant", True):
        raise UserError(
            "TrainingArguments: activation_checkpointing_kwargs: reentrant recomputation leaves out the gradients of "
            "a layer whose input needs none; write activation_checkpointing_kwargs={'use_reentrant': False}"
        )
