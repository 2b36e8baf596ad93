"""Pieces joined in one pass against the same pieces merged one after the other, and against every path in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train import attention, joined, pieces
from prefix_train.attention import tree_attention
from prefix_train.layout import Layout
from tests import trees
from tests.numerics.test_attention import NAMES, SCALE, inputs, truth, weights, with_gradients

TREES = [
    ([1], [-1]),
    trees.FIVE_DEEP,
    ([37, 17, 16, 1, 33, 15], [-1, 0, 0, 0, 0, -1]),
    trees.random_tree(3, 4),
]


class ForEachQueryHead(pieces.CpuPieces):
    """As CUDA's kernels: gradients of keys and values come for each query head."""

    def forward(self, inputs: pieces.Triple, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(pieces._one_head_each(inputs), scale, causal)
        return out, lse.view(out.shape[:3])

    def backward(self, grad: Tensor, inputs: pieces.Triple, *rest: object) -> pieces.Triple:
        return super().backward(grad, pieces._one_head_each(inputs), *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("each_head", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "bound"), [(torch.float32, 16, 2e-6), (torch.bfloat16, 24, 1e-2), (torch.float16, 40, 2e-3)]
)
def test_equals_every_path_alone(
    dtype: torch.dtype, size: int, bound: float, each_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if each_head:
        monkeypatch.setattr(attention, "pieces_for", lambda query: ForEachQueryHead())
    for tree in TREES:
        layout = Layout.from_tree(*tree)
        of = inputs(layout, dtype, size=size)
        grad = weights(layout, size=size).to(dtype).double()
        out = tree_attention(*of, layout, SCALE, "joined")
        assert (out.shape, out.dtype) == ((1, layout.total, 4, size), dtype)
        found, expected = with_gradients(out, of, grad), truth(layout, of, grad)
        if layout.total > 1:
            trees.assert_close(found, expected, bound, NAMES)


def test_rounds_once() -> None:
    """Where every row has at most two pieces the result is the merged one, rounded in the same place. In float16: to
    bfloat16 the interpreter cuts off instead of rounding."""
    layout = Layout.from_tree([40, 13, 13, 13], [-1, 0, 0, 0])
    of, grad = inputs(layout, torch.float16), weights(layout)
    one, other = (
        with_gradients(tree_attention(*of, layout, SCALE, kernels), of, grad) for kernels in ("joined", "merged")
    )
    for fast, slow in zip(one, other, strict=True):
        assert float((fast != slow).double().mean()) < 0.01  # the order of additions moves a few to the next number


def test_log_sum_exp_and_layout_of_memory() -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of = [x.detach() for x in inputs(layout, torch.float32)]
    out, lse = attention._joined(*of, layout, SCALE)
    wanted, wanted_lse = attention._merged(*of, layout, SCALE)
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    assert trees.relative(out, wanted) < 1e-6
    assert trees.relative(lse, wanted_lse) < 1e-6


def test_a_forgotten_piece_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: nobody reads the first node of its root path."""
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of, grad = inputs(layout, torch.float32), weights(layout)
    right = joined.tables(layout)
    wrong = joined.Tables(right.tiles, right.segments, right.depth - 1)
    monkeypatch.setattr(joined, "tables", lambda _: wrong)
    found = with_gradients(tree_attention(*of, layout, SCALE, "joined"), of, grad)
    assert trees.relative(found[0], truth(layout, of, grad)[0]) > 0.01


def test_what_is_not_supported_is_named() -> None:
    layout = Layout.from_tree([4], [-1])
    with pytest.raises(UserError, match=r"bfloat16, float16, float32 with heads of up to 256, not torch.float64"):
        tree_attention(*inputs(layout, torch.float64), layout, SCALE, "joined")
    with pytest.raises(UserError, match="with heads of 264: set"):
        tree_attention(*inputs(layout, torch.float32, size=264), layout, SCALE, "joined")
