"""The convolution over a forest by kernels of our own against every root path alone in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train import forest_conv
from prefix_train.deltanet import tree_conv, tree_conv_parts
from prefix_train.layout import Layout
from tests import trees
from tests.alone import CONV_NAMES, conv_truth, draws, with_gradients

SHORT = ([1, 2, 3, 1, 1, 2, 1, 3, 2, 5], [-1, 0, 1, 2, 3, 4, 1, 0, -1, 8])
"""Segments of one, two and three rows, up to six deep: what some read begins three segments above."""

TREES = [([1], [-1]), SHORT, trees.FIVE_DEEP, trees.MANY_SHORT, ([70, 1, 2, 130], [-1, 0, 1, 0])]

PARTS = (2, 7, 260)
"""Channels of three outputs: that suit no block, and that need two."""


def inputs(layout: Layout, dtype: torch.dtype, channels: int, strided: bool = True) -> list[Tensor]:
    """x a part of wider rows, weight and bias."""
    x, weight, bias = draws(layout.total, (layout.total, channels + 5), (channels, layout.width), (channels,))
    x = x.to(dtype)[:, 3 : channels + 3] if strided else x.to(dtype)[:, :channels].contiguous()
    return [one.detach().requires_grad_() for one in (x, weight.to(dtype), bias.to(dtype))]


def by_parts(of: Sequence[Tensor], layout: Layout, sizes: Sequence[int] = PARTS) -> Tensor:
    parts = tree_conv_parts(*of, layout, sizes, kernels="fla_forest")  # type: ignore[arg-type]
    assert [tuple(part.shape) for part in parts] == [(layout.total, size) for size in sizes]
    assert all(part.is_contiguous() for part in parts)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_equals_every_path_alone(dtype: torch.dtype, bound: float, width: int) -> None:
    for tree in TREES if width == 4 and dtype == torch.float32 else TREES[1:2]:
        layout = Layout.from_tree(*tree, width=width)
        of = inputs(layout, dtype, sum(PARTS))
        grad = draws(1, (layout.total, sum(PARTS)))[0].to(dtype).double()
        found = with_gradients(by_parts(of, layout), of, grad)
        assert [one.dtype for one in found] == [dtype] * 4
        trees.assert_close(found, conv_truth(layout, of, grad), bound, CONV_NAMES)


@pytest.mark.parametrize("activation", ["silu", None])
def test_without_bias_or_activation_and_frozen(activation: str | None) -> None:
    layout = Layout.from_tree(*SHORT)
    x, weight, _ = (one.detach() for one in inputs(layout, torch.float32, 20, strided=False))
    x.requires_grad_()
    grad = draws(1, (layout.total, 20))[0]
    found = with_gradients(tree_conv(x, weight, None, layout, activation, "fla_forest"), [x], grad)
    wide = x.detach().double().requires_grad_()
    wanted = with_gradients(tree_conv(wide, weight.double(), None, layout, activation), [wide], grad)
    trees.assert_close(found, wanted, 1e-6, CONV_NAMES[:2])


def test_a_frozen_convolution_has_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, learned = Layout.from_tree(*SHORT), list[bool]()
    backward = forest_conv.backward

    def spied(*given: object) -> tuple[Tensor, Tensor | None, Tensor | None]:
        learned.append(bool(given[-1]))
        return backward(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(forest_conv, "backward", spied)
    for frozen in (True, False):
        x, weight, bias = inputs(layout, torch.float32, 20)
        weight.requires_grad_(not frozen)
        bias.requires_grad_(False)
        tree_conv(x, weight, bias, layout, kernels="fla_forest").sum().backward()  # type: ignore[no-untyped-call]
        assert (weight.grad is None) == frozen
    assert learned == [False, True]


def test_rounds_once() -> None:
    """In float16, to which the interpreter rounds, as bfloat16 it cuts off: outputs and gradients are those in float64,
    rounded, but for a few next to the middle between two numbers; with many readers of one sign, too."""
    for tree in (SHORT, ([5, *[1] * 70], [-1, *[0] * 70])):
        layout = Layout.from_tree(*tree)
        of = [one.detach().abs().requires_grad_() for one in inputs(layout, torch.float16, 20)]
        grad = draws(1, (layout.total, 20))[0].abs().half().double()
        found = with_gradients(tree_conv(*of, layout, kernels="fla_forest"), of, grad)  # type: ignore[arg-type]
        pairs = zip(found, conv_truth(layout, of, grad), strict=True)
        assert float(torch.cat([(mine != truth.half()).flatten() for mine, truth in pairs]).double().mean()) < 0.005


def test_no_further_from_the_truth_than_copies_whose_gradients_are_rounded_twice() -> None:
    """What flash-linear-attention's path does with rows that are copied: a sum of what was rounded before."""
    layout = Layout.from_tree(*SHORT)
    of = inputs(layout, torch.float16, 200)
    grad = draws(1, (layout.total, 200))[0].half().double()
    truth = conv_truth(layout, of, grad)
    mine, other = (
        with_gradients(tree_conv(*of, layout, kernels=kernels), of, grad)  # type: ignore[arg-type]
        for kernels in ("fla_forest", "reference")
    )
    for ours, theirs, right in zip(mine[:2], other[:2], truth[:2], strict=True):
        assert trees.relative(ours, right) <= 1.001 * trees.relative(theirs, right)


def test_gradients_are_the_same_again() -> None:
    layout = Layout.from_tree([70, *[3] * 40], [-1, *[0] * 40])
    of, grad = inputs(layout, torch.float32, 20), draws(1, (layout.total, 20))[0]
    one, again = (with_gradients(tree_conv(*of, layout, kernels="fla_forest"), of, grad) for _ in range(2))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


@pytest.mark.parametrize("part", ["before", "own", "history"])
def test_a_forgotten_row_would_show(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults: nobody reads the row before a segment; a gradient that is due to it, or its own, is not put down."""
    layout = Layout.from_tree(*SHORT)
    of, grad = inputs(layout, torch.float32, 20), draws(1, (layout.total, 20))[0]
    column = {"history": 4, "before": 7, "own": 10}[part]
    right = forest_conv.tables(layout)
    tiles = right.tiles.clone()
    tiles[:, column] = -1
    wrong = forest_conv.Tables(tiles, right.runs, right.origin, right.slots)
    monkeypatch.setattr(forest_conv, "tables", lambda _: wrong)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **given: empty(*sizes, **given).zero_())
    found = with_gradients(tree_conv(*of, layout, kernels="fla_forest"), of, grad)  # type: ignore[arg-type]
    truth = conv_truth(layout, of, grad)
    assert max(trees.relative(a, b) for a, b in zip(found[:2], truth[:2], strict=True)) > 0.01


def test_what_is_not_supported_is_named() -> None:
    layout = Layout.from_tree([4], [-1])
    with pytest.raises(
        UserError, match=r"bfloat16, float16, float32 and a convolution of a width up to 4, not torch.f"
    ):
        tree_conv(*inputs(layout, torch.float64, 8), layout, kernels="fla_forest")  # type: ignore[arg-type]
    layout = Layout.from_tree([4], [-1], width=6)
    with pytest.raises(UserError, match=r"not torch.float32 and 6: set model.deltanet=fla"):
        tree_conv(*inputs(layout, torch.float32, 8), layout, kernels="fla_forest")  # type: ignore[arg-type]
