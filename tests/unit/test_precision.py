"""Trained parameters are cast together, and come out as where each is cast by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prefix_train import precision
from tests.launches import Launches


class Three(nn.Module):
    """Two layers that share a weight, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(7, 7), nn.Linear(7, 7, bias=False), nn.Linear(3, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def gradients(module: nn.Module, passes: int) -> dict[str, Tensor]:
    """Through `Copies`."""
    copies = precision.Copies(module, torch.bfloat16)
    for number in range(passes):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number)).bfloat16()
        with copies:
            module(x).square().sum().backward()  # type: ignore[no-untyped-call]
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


def one_by_one(module: Three, passes: int) -> dict[str, Tensor]:
    """As `gradients`, with casts that autograd knows."""
    for number in range(passes):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number)).bfloat16()
        weight, bias = module.first.weight.bfloat16(), module.first.bias.bfloat16()
        inner = nn.functional.linear(x, weight, bias)
        nn.functional.linear(inner, weight).square().sum().backward()
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_those_of_single_casts_to_the_bit(passes: int) -> None:
    torch.manual_seed(0)
    module = Three()
    mine = gradients(module, passes)
    module.zero_grad()
    theirs = one_by_one(module, passes)
    assert mine.keys() == theirs.keys() == {"first.weight", "first.bias"}
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == torch.float32 for name in mine)


def test_all_casts_are_one_launch_each_way() -> None:
    module = Three()
    with Launches() as launches:
        gradients(module, 1)
    names = [name for (_, name, _), count in launches.found.items() for _ in range(count)]
    assert names.count("_foreach_copy_") == 2
    assert names.count("_to_copy") == 1  # the input


def test_hooks_of_masters_see_their_gradients() -> None:
    """So is an update's bad gradient told by name."""
    module, seen = Three(), list[torch.dtype]()
    module.first.weight.register_hook(lambda grad: seen.append(grad.dtype))  # type: ignore[no-untyped-call]
    gradients(module, 1)
    assert seen == [torch.float32]
