"""The truth that packs are held against: each example alone, through transformers' own classes and none of our code.

`float64()` makes those classes compute in float64, which they do not by themselves: norms, rotary embeddings and the
delta rule ask for float32 whatever their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Example:
    """One example alone.

    ids: [L]. targets: [M], positions of target tokens, each at least 1. weights: [M], float64. pixels: [P, values] and
    grids: [N, 3] (time, height, width in patches), images in the order of their placeholders.
    """

    ids: Tensor
    targets: Tensor
    weights: Tensor
    pixels: Tensor | None = None
    grids: Tensor | None = None


@dataclass
class Result:
    """loss: sum over all examples' targets of weight x cross-entropy. hidden: [L, hidden] of each example, after the
    last norm. losses: [M] of each example, unweighted. gradients: by parameter name, of the loss."""

    loss: Tensor
    hidden: list[Tensor]
    losses: list[Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


def run(model: PreTrainedModel, examples: Sequence[Example], image_token: int | None = None) -> Result:
    """Each example through the model, which must be unpatched, and the gradients of the summed loss.

    model: a transformers model with a head. image_token: the placeholder's id, where examples have images. Gradients
    that the model holds are cleared before and after.
    """
    model.zero_grad(set_to_none=True)
    result = Result(torch.zeros((), dtype=torch.float64), [], [])
    for example in examples:
        hidden = model.model(**inputs(example, image_token), use_cache=False).last_hidden_state[0]
        logits = model.lm_head(hidden[example.targets - 1])
        losses = F.cross_entropy(logits, example.ids[example.targets], reduction="none")
        loss = (losses * example.weights.to(losses.dtype)).sum()
        loss.backward()
        result.loss += loss.detach()
        result.hidden.append(hidden.detach())
        result.losses.append(losses.detach())
    result.gradients = gradients(model)
    model.zero_grad(set_to_none=True)
    return result


def inputs(example: Example, image_token: int | None = None) -> dict[str, Tensor]:
    """The example as keywords of transformers' forward; position ids are left to the model's own index function."""
    given = {"input_ids": example.ids[None]}
    if example.pixels is not None:
        kinds = (example.ids == image_token).to(torch.int32)[None]
        given |= {"pixel_values": example.pixels, "image_grid_thw": example.grids, "mm_token_type_ids": kinds}
    return given


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that the model's parameters hold, by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


class float64(TorchFunctionMode):
    """Within this context, what asks for float32 gets `wide`.

    That is `Tensor.float`, every argument that is torch.float32, and new tensors that name no dtype.
    Works on the CPU, where backward runs on the calling thread; experts need `set_experts_implementation("eager")`.
    calls: the functions whose arguments were changed. wide=torch.float32 changes nothing and still counts.
    """

    def __init__(self, wide: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.wide = wide
        self.calls: set[str] = set()

    def __enter__(self) -> float64:
        super().__enter__()
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(self.wide)
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self.default)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is torch.Tensor.float:
            self.calls.add("Tensor.float")
            return args[0].to(self.wide)
        if any(value is torch.float32 for value in (*args, *kwargs.values())):
            self.calls.add(getattr(func, "__name__", str(func)))
            args = tuple(self.wide if value is torch.float32 else value for value in args)
            kwargs = {name: self.wide if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _backward(
        self, root: Tensor, gradient: Tensor | None, retain_graph: bool | None, create_graph: bool, inputs: object
    ) -> None:
        """A mode is off while it handles a function, but what backward recomputes needs it on."""
        assert not create_graph
        assert inputs is None
        gradient = torch.ones_like(root) if gradient is None else gradient
        super().__enter__()
        try:
            _engine_run_backward(
                (root,), (gradient,), bool(retain_graph), False, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            super().__exit__(None, None, None)
