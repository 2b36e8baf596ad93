"""FSDP2 over CPU (gloo) and GPU (NCCL) alike: what CI tests is what runs.

Every decoder layer and every vision block is a group of its own, all the rest is the root's: embeddings, final norm,
mergers and the head, whose chunks differ in number between ranks and so may not gather on their own.
Gradients are summed over ranks in float32, not averaged: the loss's weights already are those of the whole update.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from prefix_train import unit
from prefix_train.model import Root


def shard(root: Root, mesh: DeviceMesh) -> None:
    """Shard `root` over `mesh` (one dimension), in place; every rank must hold the same full parameters.

    They move to the mesh's devices group by group, so that no device ever holds them all. Parameters become DTensors
    under their own names. Computing stays in `root.dtype`, trained parameters stay float32.
    """
    unit.leave_precision_to_sharding(root.anatomy)
    root.copies = None
    reduce = torch.promote_types(root.dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=root.dtype, reduce_dtype=reduce, cast_forward_inputs=False)
    for module in (*root.anatomy.units, root):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def release(root: Root) -> None:
    """Drop the gathered parameters that a forward without backward leaves in the root."""
    if isinstance(root, FSDPModule):
        root.reshard()
