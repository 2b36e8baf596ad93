"""The causal convolution of Gated DeltaNet over a forest of segments.

Each segment is preceded by the last W - 1 inputs of its root path, one convolution runs over everything, and the
outputs of those warm-up rows are dropped: they are the only ones that read across a boundary. Kernels that take what
comes before each segment apart from the buffer need neither, nor do those that find it in the buffer (`forest_conv`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from prefix_train import flash_linear, forest_conv
from prefix_train.layout import History, Layout
from prefix_train.sums import sum_runs

WITHOUT_COPIES = ("fla_segments", "fla_forest")
"""Kernels that write the channels in parts, from a buffer of the size of the inputs."""


def tree_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout,
    activation: str | None = "silu",
    kernels: str = "reference",
) -> Tensor:
    """Depthwise causal convolution where each token reads the W - 1 tokens before it on its root path.

    x: [T, C]. weight: [C, W], last tap at the token itself. bias: [C] or None. activation: `silu` or None. kernels:
    `reference`, `fla`, `fla_segments`, `fla_forest` or `fla_cuda`. Computed in at least float32; returns [T, C] in the
    dtype of x. Raises ValueError where the layout was built for another length or width, or the kernels are unknown;
    UserError where the kernels do not take the dtype or the width.
    """
    if kernels in WITHOUT_COPIES:
        return tree_conv_parts(x, weight, bias, layout, [x.shape[1]], activation, kernels)[0]
    _check(x, weight, layout, activation)
    extended: Tensor = _Extend.apply(x, layout.history)  # type: ignore[no-untyped-call]
    if kernels == "fla":
        convolved = flash_linear.convolve(extended, weight, bias, activation)
    elif kernels == "fla_cuda":
        convolved = flash_linear.convolve_cuda(extended, weight, bias, activation, layout.history)
    elif kernels == "reference":
        convolved = _Convolve.apply(extended, weight, bias, activation == "silu")  # type: ignore[no-untyped-call]
    else:
        raise ValueError(
            f"convolution kernels {kernels!r} are unknown: reference, fla, fla_segments, fla_forest, fla_cuda"
        )
    kept: Tensor = _Drop.apply(convolved, layout.history)  # type: ignore[no-untyped-call]
    return kept


def tree_conv_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout,
    sizes: Sequence[int],
    activation: str | None = "silu",
    kernels: str = "reference",
) -> list[Tensor]:
    """`tree_conv`, its channels in parts of `sizes`: [T, size] each, contiguous where the kernels can write them so."""
    if kernels not in WITHOUT_COPIES:
        return list(torch.split(tree_conv(x, weight, bias, layout, activation, kernels), list(sizes), 1))
    _check(x, weight, layout, activation)
    if kernels == "fla_forest":
        forest_conv.require(x, layout.width)
        return list(_Forest.apply(x, weight, bias, layout, activation, sizes))  # type: ignore[no-untyped-call]
    return list(_Segments.apply(x, weight, bias, layout.history, activation, sizes))  # type: ignore[no-untyped-call]


def _check(x: Tensor, weight: Tensor, layout: Layout, activation: str | None) -> None:
    if x.shape[0] != layout.total:
        raise ValueError(f"the layout has {layout.total} positions, but the convolution got {x.shape[0]}")
    if weight.shape[1] != layout.width:
        raise ValueError(
            f"a convolution of width {weight.shape[1]} over a layout for width {layout.width}: "
            f"build it with Layout.from_tree(..., width={weight.shape[1]})"
        )
    if activation not in ("silu", None):
        raise ValueError(f"the convolution's activation is {activation!r}; only 'silu' and None are known")


class _Segments(Function):
    """Each segment by itself, from the last inputs of its root path, whose gradients add up at the originals.

    sizes: of parts of the channels, whose outputs are tensors of their own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        history: History,
        activation: str | None,
        sizes: Sequence[int],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, bias)
        ctx.history, ctx.activation, ctx.sizes = history, activation, sizes
        parts = _parted(sizes, x, weight, bias, _states(x, weight.shape[1], history))
        return tuple(flash_linear.convolve_segments(*part, activation, history) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        history: History = ctx.history
        parts = _parted(ctx.sizes, x, weight, bias, _states(x, weight.shape[1], history))
        found = [
            flash_linear.convolve_segments_backward(grad, *part, ctx.activation, history)
            for grad, part in zip(grads, parts, strict=True)
        ]
        of_x, of_weight, of_bias, of_states = (
            None if one[0] is None else one[0] if len(one) == 1 else torch.cat(one, axis)
            for one, axis in zip(zip(*found, strict=True), (1, 0, 0, 1), strict=True)
        )
        assert of_x is not None
        assert of_states is not None
        rows = of_states[:, :, 1:].transpose(1, 2).reshape(-1, x.shape[1])
        of_copies = sum_runs(rows.index_select(0, history.copied), history.copies)
        total = of_x.index_select(0, history.origin).to(of_copies.dtype) + of_copies
        of_x.index_copy_(0, history.origin, total.to(of_x.dtype))
        return of_x, of_weight, of_bias, None, None, None


def _parted(
    sizes: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    first = 0
    for size in sizes:
        of = slice(first, first + size)
        yield x[:, of], weight[of], None if bias is None else bias[of], states[:, of].contiguous()
        first += size


def _states(x: Tensor, width: int, history: History) -> Tensor:
    """[S, C, W] in at least float32: the last W - 1 inputs before each segment; the first of W is not read."""
    rows = x.index_select(0, history.before).index_fill_(0, history.absent, 0)
    states = torch.zeros(
        len(history.cu_seqlens_cpu) - 1, x.shape[1], width,
        dtype=torch.promote_types(x.dtype, torch.float32), device=x.device,
    )  # fmt: skip
    states[:, :, 1:] = rows.view(len(states), width - 1, x.shape[1]).transpose(1, 2)
    return states


class _Forest(Function):
    """By kernels of our own over the whole forest. sizes: of parts of the channels, whose outputs are own tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layout: Layout,
        activation: str | None,
        sizes: Sequence[int],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, bias)
        ctx.layout, ctx.silu = layout, activation == "silu"
        return forest_conv.forward(x, weight, bias, layout, ctx.silu, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        learned = any(ctx.needs_input_grad[1:3])
        found = forest_conv.backward(grads, x, weight, bias, ctx.layout, ctx.silu, learned)
        return *found, None, None, None


class _Extend(Function):
    """[T, C] -> [history.rows, C]: warm-up rows before each segment. Copies' gradients add up at the originals.

    Whole tensors are gathered, never scattered: CUDA writes to given rows several times slower than it reads them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, history: History) -> Tensor:
        ctx.history = history
        return x.index_select(0, history.source).index_fill_(0, history.blank, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        history: History = ctx.history
        own = grad.index_select(0, history.kept)
        of_copies = sum_runs(grad.index_select(0, history.copy_to), history.copies)
        total = own.index_select(0, history.origin).to(of_copies.dtype) + of_copies
        return own.index_copy_(0, history.origin, total.to(own.dtype)), None


class _Drop(Function):
    """[history.rows, C] -> [T, C]: without the warm-up rows, whose gradients are zero."""

    @staticmethod
    def forward(ctx: Any, extended: Tensor, history: History) -> Tensor:
        ctx.history = history
        return extended.index_select(0, history.kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.history.source).index_fill_(0, ctx.history.added, 0), None


class _Convolve(Function):
    """Causal convolution of one sequence [n, C] in at least float32; the first W - 1 outputs are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activate: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.activate = activate
        before = _before_activation(x, weight, bias)
        out = torch.zeros_like(x)
        out[weight.shape[1] - 1 :] = silu(before, inplace=True) if activate else before
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, bias = ctx.saved_tensors
        width = weight.shape[1]
        before = _before_activation(x, weight, bias)
        wide, taps = x.to(before.dtype), weight.t().to(before.dtype).contiguous()
        grad = grad[width - 1 :].to(before.dtype)
        if ctx.activate:
            grad = torch.ops.aten.silu_backward(grad, before)
        grad_x = torch.zeros_like(wide)
        grad_taps = torch.empty_like(taps)
        for tap in range(width):
            reach = slice(tap, tap + grad.shape[0])
            grad_x[reach].addcmul_(grad, taps[tap])
            torch.sum(grad * wide[reach], 0, out=grad_taps[tap])
        grad_bias = None if bias is None else grad.sum(0).to(bias.dtype)
        return grad_x.to(x.dtype), grad_taps.t().to(weight.dtype), grad_bias, None


def _before_activation(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[n, C], [C, W] -> [n - W + 1, C] in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.promote_types(weight.dtype, torch.float32)))
    taps = weight.t().to(wide.dtype).contiguous()
    rows = x.shape[0] - len(taps) + 1
    total = wide[:rows] * taps[0]
    for tap in range(1, len(taps)):
        total.addcmul_(wide[tap : tap + rows], taps[tap])
    return total if bias is None else total.add_(bias)
