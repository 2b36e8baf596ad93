"""The oracle's float64 is transformers' own computation, wider, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import forests, models, oracle


class Narrow(TorchDispatchMode):
    """Collects operations, of forward and backward, whose result is float32 or narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.found.add(str(func))
        return result


def examples(family: str, dtype: torch.dtype) -> tuple[Any, list[oracle.Example]]:
    model = models.build(family, dtype)
    images = (0, 2) if family in models.WITH_VISION else ()
    return model, forests.build(model, [9, 65, 3], [-1, 0, 0], images=images).examples


@pytest.mark.parametrize("family", models.FAMILIES)
def test_mode_that_widens_nothing_changes_nothing(family: str) -> None:
    model, alone = examples(family, torch.float32)
    plain = oracle.run(model, alone, models.IMAGE)
    with oracle.float64(wide=torch.float32) as mode:
        same = oracle.run(model, alone, models.IMAGE)
    assert "Tensor.float" in mode.calls
    assert mode.calls <= {"Tensor.float", "softmax", "to", "type", "zeros"}
    assert torch.equal(plain.loss, same.loss)
    assert all(torch.equal(a, b) for a, b in zip(plain.hidden, same.hidden, strict=True))
    assert plain.gradients.keys() == same.gradients.keys()
    assert all(torch.equal(plain.gradients[name], same.gradients[name]) for name in plain.gradients)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_everything_is_float64_within_the_mode(family: str) -> None:
    model, alone = examples(family, torch.float64)
    with Narrow() as without:
        oracle.run(model, alone, models.IMAGE)
    assert without.found, "the mode is not needed"
    with oracle.float64(), Narrow() as within:
        oracle.run(model, alone, models.IMAGE)
    assert not within.found


@pytest.mark.parametrize("family", models.FAMILIES)
def test_float64_agrees_with_stock_float32(family: str) -> None:
    model, alone = examples(family, torch.float32)
    stock = oracle.run(model, alone, models.IMAGE)
    model, alone = examples(family, torch.float64)
    with oracle.float64():
        wide = oracle.run(model, alone, models.IMAGE)
    forests.assert_same(stock, wide, hidden=5e-6, gradient=5e-5)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_no_gradient_vanishes(family: str) -> None:
    model, alone = examples(family, torch.float32)
    found = oracle.run(model, alone, models.IMAGE).gradients
    whole = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    assert found.keys() == dict(model.named_parameters()).keys()
    assert min(gradient.norm() / whole for gradient in found.values()) > 1e-5
