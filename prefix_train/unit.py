"""What surrounds one layer's own forward: its dropout's draw, its compute copies, and the one recomputation there is.

No module is wrapped (PEFT finds its tensors by module name): a unit's `forward` is replaced on the instance, inside
FSDP2's hooks. Whatever a recomputation needs, the layout above all, reaches it as an argument of that forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from configs.errors import UserError
from prefix_train import budget, dropout, halves, shelf
from prefix_train.anatomy import Anatomy
from prefix_train.precision import Copies

_now = threading.local()


def recomputing() -> bool:
    """Whether this thread computes a layer once more, for its backward."""
    return getattr(_now, "recomputing", False)


class _Recomputation(AbstractContextManager[None]):
    """Entered once for each backward: a graph that is kept has several."""

    def __enter__(self) -> None:
        _now.recomputing = True

    def __exit__(self, *_: object) -> None:
        _now.recomputing = False


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _Recomputation()


class UnitForward:
    """Replaces `module.forward`. recompute: keep only the inputs and run forward again in backward.

    halves: of a layer that keeps its middle, each recomputed by itself.
    """

    def __init__(self, module: nn.Module, recompute: bool) -> None:
        self.module, self.recompute = module, recompute
        self.halves: tuple[UnitForward, UnitForward] | None = None
        self.copies: AbstractContextManager[None] = nullcontext()
        self.around: Callable[[Tensor], AbstractContextManager[None]] = lambda hidden: nullcontext()
        self.wait: Callable[[Tensor], shelf.Waiting] | None = None
        self._inner: Callable[..., Any] = module.forward
        self._dropouts = dropout.find(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            if self.halves is not None:
                mixer, feed_forward = self.halves
                return feed_forward(mixer(*args, **kwargs), **kwargs)
            run = self._run if self.wait is None else partial(self._run_with, shelf.Shelf(self.wait))
            with self.around(args[0]):
                return checkpoint(
                    run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts, **kwargs
                )
        return self._run(*args, **kwargs)

    def _run_with(self, kept: shelf.Shelf, *args: Any, **kwargs: Any) -> Any:
        with shelf.use(kept):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._dropouts:
            dropout.set_draw(self._dropouts, kwargs["layout"].draw)
        with self.copies:
            return self._inner(*args, **kwargs)


def install(found: Anatomy, recompute: bool) -> None:
    """Give every unit of the model its UnitForward; decoder layers recompute if `recompute`.

    Raises UserError where the model recomputes by other means already.
    """
    refuse_other_recomputation(found.base)
    for layer in found.layers:
        layer.forward = UnitForward(layer, recompute)
    for block in found.blocks:
        block.forward = UnitForward(block, recompute=False)


def compute_in(found: Anatomy, dtype: torch.dtype) -> Copies:
    """Let every unit compute with copies in `dtype` of its trainable parameters; the returned context is the rest's."""
    for forward in _forwards(found):
        forward.copies = Copies(forward.module, dtype)
    return Copies(found.base, dtype, nested=found.units)


def leave_precision_to_sharding(found: Anatomy) -> None:
    """Take the copies away again."""
    for forward in _forwards(found):
        forward.copies = nullcontext()


def around_recomputed(layer: nn.Module, around: Callable[[Tensor], AbstractContextManager[None]]) -> None:
    """Compute what keeps the input of `layer`, itself or its first half, within `around(that input)` where it will be
    recomputed. Raises ValueError where it never is."""
    require_recomputed(layer)
    _first(layer).around = around


def keep_middle(found: Anatomy, keep: str) -> None:
    """Let the last layers, as many as `memory.keep_middle` says, keep their middle. Before anything else is asked of
    what recomputes them. Raises UserError, naming its class, for a layer that is not known to have one."""
    layers = found.layers
    for layer in layers[len(layers) - budget.kept_layers(keep, len(layers)) :]:
        require_recomputed(layer)
        forward = _forward_of(layer)
        mixer, feed_forward = halves.of(layer, forward._inner)
        forward.halves = UnitForward(mixer, recompute=True), UnitForward(feed_forward, recompute=True)


def compute_by(layer: nn.Module, replace: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let something else compute `layer`, and its halves: `replace(module, forward)` takes the place of `forward`."""
    for forward in (_forward_of(layer), *(_forward_of(layer).halves or ())):
        forward._inner = replace(forward.module, forward._inner)


def keeps_middle(layer: nn.Module) -> bool:
    """Does this layer keep what lies between its token mixer and its feed-forward?"""
    return _forward_of(layer).halves is not None


def around_middle(layer: nn.Module, around: Callable[[Tensor], AbstractContextManager[None]]) -> None:
    """Compute what comes after the middle of `layer`, which keeps it, within `around(middle)` where that will be
    recomputed."""
    found = _forward_of(layer).halves
    assert found is not None
    found[1].around = around


def unread_product(layer: nn.Module) -> nn.Module | None:
    """The linear module of this layer's mixer whose product nothing reads in a recomputation; none where something
    does, as the feed-forward's norm in a layer that does not keep its middle.

    Without an adapter it needs no stand-in: torch leaves a recomputation at the last tensor that it saves, before the
    product.
    """
    mixer = _first(layer).module
    return mixer.unread if isinstance(mixer, halves.MixerHalf) else None


def keep_attention(found: Anatomy, keep: str) -> None:
    """Let the last layers with attention, as many as `memory.keep_attention` says, keep its output where it is."""
    layers = [layer for layer in found.layers if getattr(layer, "self_attn", None) is not None]
    for layer in layers[len(layers) - budget.kept_layers(keep, len(layers)) :]:
        require_recomputed(layer)
        _first(layer).wait = shelf.stay


def keeps_attention(layer: nn.Module) -> bool:
    """Does this layer keep what its attention has computed?"""
    return _first(layer).wait is not None


def let_kept_wait(layer: nn.Module, wait: Callable[[Tensor], shelf.Waiting]) -> None:
    """Where this layer's kept output waits."""
    _first(layer).wait = wait


def require_recomputed(layer: nn.Module) -> None:
    """Raise ValueError for a layer whose forward is not run again in backward."""
    if not _forward_of(layer).recompute:
        raise ValueError("a layer that is not recomputed keeps more than its input")


def again(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`layer` once more for its backward, for somebody who kept its input himself."""
    with _Recomputation():
        return _forward_of(layer)._run(*args, **kwargs)


def bare(layer: nn.Module, *args: Any, recomputing: bool = False, **kwargs: Any) -> Any:
    """`layer`'s own forward, with the parameters and draws that it has at this moment, for somebody who put them there.

    recomputing: for its backward.
    """
    with _Recomputation() if recomputing else nullcontext():
        return _forward_of(layer)._inner(*args, **kwargs)


def refuse_other_recomputation(model: nn.Module) -> None:
    """Raise UserError where a module recomputes by transformers' switch or in a wrapper."""
    for name, module in model.named_modules():
        if isinstance(module, CheckpointWrapper):
            raise UserError(
                f"{name} is in a checkpoint wrapper, and memory.recompute recomputes layers already: "
                "two recompute paths are refused; remove the wrapper"
            )
        if getattr(module, "gradient_checkpointing", False):
            raise UserError(
                f"{name or type(module).__name__} has gradient checkpointing switched on, and memory.recompute "
                "recomputes layers already: two recompute paths are refused; call gradient_checkpointing_disable()"
            )


def _forwards(found: Anatomy) -> Iterator[UnitForward]:
    """Of all units, and of their halves."""
    for module in found.units:
        forward = _forward_of(module)
        yield from (forward, *(forward.halves or ()))


def _first(layer: nn.Module) -> UnitForward:
    """What keeps the layer's input, and computes its mixer."""
    forward = _forward_of(layer)
    return forward if forward.halves is None else forward.halves[0]


def _forward_of(module: nn.Module) -> UnitForward:
    forward = module.forward
    if not isinstance(forward, UnitForward):
        raise TypeError(f"{type(module).__name__} has no UnitForward: the model was not prepared")
    return forward
