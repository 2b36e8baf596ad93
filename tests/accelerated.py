"""A model under Accelerate's FSDP2, as docs/guides/accelerate.md has it, on GPUs or, made to, on CPUs over gloo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from prefix_train import anatomy

WRAPPER = "_checkpoint_wrapped_module."
"""What fsdp_activation_checkpointing puts into the names of parameters."""


def plugin(model: nn.Module, recompute: bool) -> FullyShardedDataParallelPlugin:
    """fsdp_version 2, a group for each decoder layer. recompute: fsdp_activation_checkpointing."""
    layers = sorted({type(layer).__name__ for layer in anatomy.find(model).layers})
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layers,
        activation_checkpointing=recompute,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )


def sharded(model: nn.Module, recompute: bool, device: torch.device) -> tuple[Accelerator, Any, Any]:
    """(accelerator, model, optimizer) after `prepare` with mixed_precision no; the process group is there already."""
    how = plugin(model, recompute)
    accelerator = Accelerator(mixed_precision="no", fsdp_plugin=how, cpu=device.type == "cpu")
    if device.type == "cpu":
        shard_on_cpu(accelerator, how)
    accelerator.state.fsdp_plugin = how
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDPModule)
    if device.type == "cpu":
        reduce_without_average(model)
    return accelerator, model, optimizer


def shard_on_cpu(accelerator: Accelerator, how: FullyShardedDataParallelPlugin) -> None:
    """Accelerate 1.15 prepares DistributedDataParallel on CPUs whatever the plugin: say that it is to shard."""
    state: Any = accelerator.state
    assert state.distributed_type == DistributedType.MULTI_CPU
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = how


def reduce_without_average(model: nn.Module) -> None:
    """gloo has no averaging reduction: sum, then divide."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Whole gradients of what is trained, on the CPU in float64, by the names that PEFT gives. Every rank calls it."""
    found = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            gradient: Any = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name.replace(WRAPPER, "")] = whole.detach().double().cpu()
    return found


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """What PEFT is to save: whole tensors. Every rank calls it."""
    return {
        name: parameter.full_tensor().detach().clone().cpu()  # type: ignore[operator]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def worst(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest relative difference of a tensor; one below 1e-6 of all gradients' norm is held against that."""
    assert mine.keys() == theirs.keys()
    whole = torch.stack([each.norm() for each in theirs.values()]).norm()
    return max(float((mine[name] - each).norm() / max(each.norm(), 1e-6 * whole)) for name, each in theirs.items())
