"""A pack's loss as part of the model's own forward: what any trainer can call, wrap and shard.

Data parallelism and sharding act on a module's call. So the body is called, then the head once, as transformers would;
only that the head, told the targets, turns hidden states into the loss, a chunk of prediction rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from configs.schema import TrainConfig
from prefix_train import anatomy
from prefix_train.embedding import embed
from prefix_train.families import NotExact
from prefix_train.loss import Targets, target_losses
from prefix_train.patch import Handle, Patch, shared_prefix


@contextmanager
def train_packs(model: nn.Module, attention: str = "auto", deltanet: str = "auto") -> Iterator[Handle]:
    """`shared_prefix`, where the forward also takes `targets=` and then returns an output whose `loss` is the pack's.

    model, attention, deltanet, errors: as `shared_prefix`. The forward takes the keywords of a pack of
    `pack_examples`. Enter it before the model is wrapped or sharded, and leave it after the last forward. Raises
    NotExact for a model whose head cannot be understood, and in a forward for a recomputation that would draw other
    dropout masks than the forward did.
    """
    if not isinstance(model, PreTrainedModel | PeftModel):
        raise NotExact(
            f"{type(model).__name__} is no model of transformers or PEFT: enter train_packs before the model is wrapped"
        )
    with shared_prefix(model, attention, deltanet) as handle:
        try:
            found = anatomy.find(model)
        except ValueError as error:
            raise NotExact(f"{error}; call the model without targets and compute the loss from its logits") from error
        base, head = found.base, found.head
        patches = [
            Patch(base, "forward", partial(_forward, base, base.forward)),
            Patch(head, "forward", partial(_head_forward, head, head.forward)),
        ]
        for patch in patches:
            patch.apply()
        try:
            yield handle
        finally:
            for patch in reversed(patches):
                patch.undo()


def takes_targets(model: nn.Module) -> bool:
    """Is `model`, or the model that it is PEFT's wrapper of, under `train_packs`?"""
    forward = vars(model.get_base_model() if isinstance(model, PeftModel) else model).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(base: Any, forward: Any, *args: Any, targets: Targets | None = None, **kwargs: Any) -> Any:
    """The model's own forward; with targets the loss instead of logits."""
    if targets is None:
        return forward(*args, **kwargs)
    if args:
        raise NotExact("targets: pass what the forward takes by keyword, as in model(**pack)")
    given = {name: value for name, value in kwargs.items() if value is not None}
    if "input_ids" not in given or "inputs_embeds" in given:
        raise NotExact("targets: a forward that returns the loss takes input_ids")
    if "logits_to_keep" in given:
        raise NotExact("logits_to_keep: a forward that returns the loss gives no logits; leave out targets or this")
    if base.training and torch.is_grad_enabled():
        refuse_other_masks(base)
    given["inputs_embeds"] = embed(base.get_input_embeddings(), given["input_ids"])
    if "pixel_values" not in given:
        del given["input_ids"]
    hidden = base.base_model(**given).last_hidden_state
    return CausalLMOutput(loss=base.get_output_embeddings()(hidden, targets=targets))


def _head_forward(head: Any, forward: Any, hidden: Tensor, targets: Targets | None = None) -> Tensor:
    """hidden: [1, T, D] -> logits; with targets their loss, a scalar."""
    if targets is None:
        logits: Tensor = forward(hidden)
        return logits
    return target_losses(hidden[0], targets, head.weight, TrainConfig.loss_chunk_rows).total


def refuse_other_masks(model: nn.Module) -> None:
    """Raise NotExact for a layer with dropout whose recomputation draws masks anew: its gradients would be wrong.

    torch's checkpoint does so with preserve_rng_state=False, which is what Accelerate's FSDP2 passes it.
    """
    for name, module in model.named_modules():
        for below, dropout in module.named_modules() if _forgets_masks(module) else ():
            if isinstance(dropout, nn.modules.dropout._DropoutNd) and dropout.p > 0 and dropout.training:
                where = f"{name}.{below}".replace("._checkpoint_wrapped_module", "")
                raise NotExact(
                    f"{where}: dropout {dropout.p} in a layer that is recomputed with other masks "
                    "(preserve_rng_state=False): its gradients would be wrong. Set dropout to 0, or call "
                    "model.activation_checkpointing_enable() instead of fsdp_activation_checkpointing"
                )


def _forgets_masks(module: nn.Module) -> bool:
    """Is this module recomputed in backward without the forward's random state?"""
    recompute: Any = None
    if isinstance(module, CheckpointWrapper):
        recompute = module.checkpoint_fn
    elif getattr(module, "gradient_checkpointing", False):
        recompute = getattr(module, "_gradient_checkpointing_func", None)
    return isinstance(recompute, partial) and recompute.keywords.get("preserve_rng_state", True) is False
