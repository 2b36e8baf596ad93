"""Row-wise parts of a layer (norms, adapters, feed-forward) a tile of rows at a time: they keep their inputs alone.

Each row of their output follows from the same row of their inputs, so their tensors need never be whole. Backward
computes a tile again and takes its gradients, summed over tiles in float32. Some products are then not needed at all: a
feed-forward's forward in its layer's recomputation, where only the residual sum would read its output, its last product
in a tile's, and a mixer's last product where the layer keeps its middle. What stands in for these is NaN: should
anything read it, the update fails instead of learning from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from prefix_train import dropout, frozen, fused, products, residual, together, unit
from prefix_train.anatomy import Anatomy
from prefix_train.halves import MIXERS

FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""Children of a gated feed-forward whose output is the last one's: act(gate(x)) * up(x), then down."""

READER = "post_feedforward_layernorm"
"""A child of layers in which a norm reads what the feed-forward gives, instead of the residual sum alone."""

NORM = "norm"
"""In the name of every module that normalises rows."""


def install(found: Anatomy, rows: int, elementwise: str = "torch") -> None:
    """Tile norms, adapted linear modules and gated feed-forwards of the decoder's layers. Experts stay as they are.
    Where the weights are frozen, `frozen` computes linear modules and feed-forwards, and `together` those of a mixer
    that read the same rows; else they are `Tiled`.

    rows: positions of a tile, a multiple of dropout.BLOCK; norms of heads get as many elements. elementwise: one of
    `kernel_choice.ELEMENTWISE`. Raises ValueError where `rows` is no such multiple, and where a layer is not
    recomputed: tiles are computed again in backward.
    """
    if rows % dropout.BLOCK:
        raise ValueError(f"tiles of {rows} rows are no multiple of {dropout.BLOCK}")
    for layer in found.layers:
        unit.require_recomputed(layer)
        block, unread_product = getattr(layer, "mlp", None), unit.unread_product(layer)
        within: set[nn.Module] = set()
        if block is not None and _is_feed_forward(block):
            within = set(block.modules())
            inner, known, unread = block.forward, fused.knows_activation(block), not hasattr(layer, READER)
            if known:
                inner = fused.FeedForward(block, elementwise, inner)
            block.forward = Tiled(block, rows, inner, last=_base(block.down_proj), unread=unread)
            if known and all(products.knows(getattr(block, name)) for name in FEED_FORWARD):
                block.forward = frozen.FeedForward(block, rows, elementwise, block.forward, unread)
        for name, module in layer.named_modules():
            if module in within:
                continue
            if _normalises(name, module):
                several = max(1, found.decoder.config.hidden_size // module.weight.shape[-1])
                tiled = Tiled(module, several * rows, module.forward)
                module.forward = fused.Norm(module, elementwise, tiled) if fused.knows_norm(module) else tiled
            elif isinstance(module, LoraLayer):
                unread = module is unread_product
                tiled = Tiled(module, rows, module.forward, last=_base(module), unread=unread)
                module.forward = frozen.Adapted(module, rows, tiled, unread) if products.knows(module) else tiled
        for name, mixer in layer.named_children():
            if name in MIXERS:
                together.install(mixer, rows)
        residual.install(layer, elementwise)


def _normalises(name: str, module: nn.Module) -> bool:
    own = [child for child, _ in module.named_parameters()]
    return NORM in name.rpartition(".")[2] and own == ["weight"]


def _is_feed_forward(block: nn.Module) -> bool:
    children = {name for name, child in block.named_children() if list(child.parameters())}
    return children == set(FEED_FORWARD) and hasattr(block, "act_fn")


def _base(linear: nn.Module) -> nn.Module:
    """The linear module itself, or the one that an adapter is put around."""
    return getattr(linear, "base_layer", linear)


class Tiled:
    """Replaces `module.forward`, whose inputs are [..., D] tensors with the same rows.

    rows: of a tile. inner: what computes one. last: the linear module whose product is the output, up to sums.
    unread: nothing reads the output in a recomputation.
    """

    def __init__(
        self,
        module: nn.Module,
        rows: int,
        inner: Callable[..., Tensor],
        last: nn.Module | None = None,
        unread: bool = False,
    ) -> None:
        self.module, self.rows, self.last, self.unread = module, rows, last, unread
        self.skipping = False
        self._inner = inner
        self._dropouts = dropout.find(module)
        if last is not None:
            last.forward = _Last(last, self)

    def __call__(self, *inputs: Tensor) -> Tensor:
        names, values = [], []
        for name, parameter in self.module.named_parameters():
            names.append(name)
            values.append(parameter)
        if not torch.is_grad_enabled():
            return self._forward(inputs)
        out: Tensor = _Tiles.apply(self, names, len(inputs), *inputs, *values)  # type: ignore[no-untyped-call]
        return out

    @property
    def draw(self) -> str | None:
        """(run, update, pack) of the present forward."""
        return dropout.draw_of(self._dropouts)

    def flat(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """[..., D] -> [rows, D]."""
        return [one.reshape(-1, one.shape[-1]) for one in inputs]

    def tiles(self, count: int) -> Iterator[slice]:
        """Slices of `count` rows, dropout told where each begins."""
        return dropout.tiles(self._dropouts, count, self.rows)

    def _forward(self, inputs: Sequence[Tensor]) -> Tensor:
        flat = self.flat(inputs)
        if len(flat[0]) <= self.rows:
            return self._inner(*inputs)
        out: Tensor | None = None
        for rows in self.tiles(len(flat[0])):
            part = self._inner(*(one[rows] for one in flat))
            out = part.new_empty(len(flat[0]), part.shape[-1]) if out is None else out
            out[rows] = part
        assert out is not None
        return out.view(*inputs[0].shape[:-1], out.shape[-1])

    def again(self, names: Sequence[str], values: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """A tile of the output once more, with `values` for the module's parameters; NaN where `last` is known."""
        # The module's own forward is this very object: the swap of parameters needs a call that leads past it.
        with _swapped(self.module, self._inner), self._without_last():
            out: Tensor = functional_call(self.module, dict(zip(names, values, strict=True)), tuple(inputs))
        return out

    @contextmanager
    def _without_last(self) -> Iterator[None]:
        self.skipping = True
        try:
            yield
        finally:
            self.skipping = False


class _Tiles(Function):
    @staticmethod
    def forward(ctx: Any, tiled: Tiled, names: Sequence[str], count: int, *tensors: Tensor) -> Tensor:
        ctx.tiled, ctx.names, ctx.count, ctx.draw = tiled, names, count, tiled.draw
        ctx.save_for_backward(*tensors)
        if tiled.unread and unit.recomputing():
            last: Any = tiled.last
            return products.unread(tensors[0], len(last.weight))
        return tiled._forward(tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tiled, names, count = ctx.tiled, ctx.names, ctx.count
        tensors = ctx.saved_tensors
        inputs, needed = tensors[:count], ctx.needs_input_grad[3:]
        leaves = [one.detach().requires_grad_(need) for one, need in zip(tensors[count:], needed[count:], strict=True)]
        learned = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in learned]
        flat, grads = tiled.flat(inputs), tiled.flat([grad])[0]
        into = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in flat]
        dropout.set_draw(tiled._dropouts, ctx.draw)
        for rows in tiled.tiles(len(grads)):
            parts = [one[rows].detach().requires_grad_() for one in flat]
            with torch.enable_grad():
                out = tiled.again(names, leaves, parts)
            found = torch.autograd.grad(out, [*parts, *learned], grads[rows])
            for total, part in zip(into, found, strict=False):
                total[rows] = part
            for total, part in zip(sums, found[count:], strict=True):
                total += part
        of_inputs = [one.view(before.shape) for one, before in zip(into, inputs, strict=True)]
        learned_sums = iter(sums)
        of_parameters = [next(learned_sums).to(leaf.dtype) if leaf.requires_grad else None for leaf in leaves]
        return None, None, None, *of_inputs, *of_parameters


class _Last:
    """Replaces the forward of a linear module: no product where only its gradients are wanted."""

    def __init__(self, linear: nn.Module, tiled: Tiled) -> None:
        self._linear, self._tiled = linear, tiled
        self._inner: Callable[[Tensor], Tensor] = linear.forward

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self._tiled.skipping:
            return self._inner(inputs)
        linear: Any = self._linear
        out: Tensor = _Unread.apply(inputs, linear.weight, linear.bias)  # type: ignore[no-untyped-call]
        return out


class _Unread(Function):
    """A linear map's gradients without its output."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs if weight.requires_grad else None, weight)
        return products.unread(inputs, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_weight = grad.mT @ inputs if ctx.needs_input_grad[1] else None
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return F.linear(grad, weight.mT) if ctx.needs_input_grad[0] else None, of_weight, of_bias


@contextmanager
def _swapped(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    mine = module.forward
    module.forward = forward
    try:
        yield
    finally:
        module.forward = mine
