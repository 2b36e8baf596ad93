"""The recurrence of Gated DeltaNet over a forest of segments; the convolution before it is `tree_conv`.

Depth by depth: all segments of one depth start from their parents' final states, which the depth above has left, and
only segments that have children leave one. Nothing else crosses a boundary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from prefix_train import chunked, flash_linear, kernel_choice, machine
from prefix_train.convolution import tree_conv, tree_conv_parts
from prefix_train.groups import Group
from prefix_train.kernel_choice import DELTANET as KERNELS
from prefix_train.layout import Layout
from prefix_train.sums import sum_runs

__all__ = ["resolve_kernels", "tree_conv", "tree_conv_parts", "tree_delta_rule", "tree_delta_rule_parts"]

MAX_STATE_BYTES = 512 * 2**20
"""Most that the gathered states of one recurrent call may take."""


def resolve_kernels(kernels: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, width: int = 0) -> str:
    """What `kernels`, `auto` or by name, means on `device` for inputs in `dtype`: see `kernel_choice.deltanet`.

    width: of the convolution; 0, where it is not known. UserError for what cannot run.
    """
    return kernel_choice.deltanet(kernels, machine.model(dtype, width=width), machine.of(device))


def tree_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: Layout,
    kernels: str = "reference",
) -> Tensor:
    """Gated delta rule where each segment goes on from its parent's final state.

    query, key: [1, T, H, K], L2-normalised here; the query is scaled by 1 / sqrt(K). value: [1, T, HV, V], HV a
    multiple of H. g: [1, T, HV], log of the decay. beta: [1, T, HV]. kernels: one of KERNELS.
    The state is float32, with `reference` float64 where the value is; returns [1, T, HV, V] in the value's dtype.
    Raises ValueError where the shapes do not match the layout or the states of one call would exceed 512 MiB.
    """
    return _whole(tree_delta_rule_parts(query, key, value, g, beta, layout, kernels))


def tree_delta_rule_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: Layout,
    kernels: str = "reference",
) -> list[Tensor]:
    """`tree_delta_rule`, its positions in parts that follow each other, as they have been computed."""
    if query.shape[:2] != (1, layout.total):
        raise ValueError(f"the layout has {layout.total} positions, but the delta rule got {tuple(query.shape[:2])}")
    _limit_states(key, value, layout)
    if kernels in KERNELS[1:]:  # they differ in the convolution alone
        return _over_levels([query, key, value, g, beta], layout, flash_linear.delta_rule)
    if kernels != "reference":
        raise ValueError(f"deltanet kernels {kernels!r} are unknown: {', '.join(KERNELS)}")
    wide = torch.promote_types(value.dtype, torch.float32)
    repeats = value.shape[2] // key.shape[2]
    query, key = (_normalise(x.to(wide)).repeat_interleave(repeats, 2) for x in (query, key))
    inputs = [query * key.shape[3] ** -0.5, key, value.to(wide), g.to(wide), beta.to(wide)]
    return [part.to(value.dtype) for part in _over_levels(inputs, layout, chunked.delta_rule)]


def _over_levels(inputs: list[Tensor], layout: Layout, rule: Any) -> list[Tensor]:
    """Run `rule` over all groups of segments, depth by depth. inputs: query, key, value, g, beta, each [1, T, ...]."""
    if not layout.in_level_order:
        inputs = [_reorder(x, layout.level_order, layout.level_inverse) for x in inputs]
    sizes = [group.tokens for group in layout.groups()]
    # Where there is one group its gradients need not be put together.
    parts = zip(*([x] if len(sizes) == 1 else torch.split(x, sizes, 1) for x in inputs), strict=True)
    outputs = []
    stored: Tensor | None = None
    for level in layout.levels:
        finals = []
        for group in level:
            state = None if stored is None else _inherit(stored, group)
            out, final = rule(*next(parts), state, group)
            outputs.append(out)
            if final is not None:
                finals.append(final)
        stored = torch.cat(finals) if finals else None
    if layout.in_level_order:
        return outputs
    return [_reorder(_whole(outputs), layout.level_inverse, layout.level_order)]


def _whole(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _Inherit(Function):
    """Each segment's parent's state. Backward sums over the children of each parent, in their order."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, parent_slot: Tensor, children: Tensor) -> Tensor:
        ctx.save_for_backward(children)
        return stored.index_select(0, parent_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (children,) = ctx.saved_tensors
        return sum_runs(grad, children), None, None


class _Reorder(Function):
    """Permutation along dimension 1; its backward is the inverse permutation, not an addition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(1, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(1, inverse), None, None


def _inherit(stored: Tensor, group: Group) -> Tensor:
    states: Tensor = _Inherit.apply(stored, group.parent_slot, group.children)  # type: ignore[no-untyped-call]
    return states


def _reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    reordered: Tensor = _Reorder.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return reordered


def _normalise(x: Tensor) -> Tensor:
    # The epsilon of transformers and of flash-linear-attention.
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _limit_states(key: Tensor, value: Tensor, layout: Layout) -> None:
    of_one = value.shape[2] * key.shape[3] * value.shape[3] * max(4, value.element_size())
    largest = max(len(group.segments) for group in layout.groups())
    if largest * of_one > MAX_STATE_BYTES:
        raise ValueError(
            f"{largest} recurrent states of {of_one / 2**20:.1f} MiB in one call exceed 512 MiB: "
            f"build the layout with Layout.from_tree(..., group={max(1, MAX_STATE_BYTES // of_one)})"
        )
