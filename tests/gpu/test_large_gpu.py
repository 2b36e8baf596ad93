"""Tensors of more than 2^31 elements, at 212,000 positions: rows near the end against plain torch in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefix_train import counted
from prefix_train.attention import tree_attention
from prefix_train.convolution import tree_conv
from prefix_train.counted import Draw
from prefix_train.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PREFIX, COUNT, LENGTH = 150_000, 62, 1000
TOTAL = PREFIX + COUNT * LENGTH
WIDTH = 10_240
ROWS = [0, 1, PREFIX - 1, PREFIX, TOTAL - LENGTH - 1, TOTAL - LENGTH, TOTAL - 7, TOTAL - 1]


@pytest.fixture(autouse=True)
def room() -> None:
    assert TOTAL * WIDTH > 1 << 31
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")


def layout() -> Layout:
    return Layout.from_tree([PREFIX, *[LENGTH] * COUNT], [-1, *[0] * COUNT]).to("cuda")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.bfloat16)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.float() - truth).norm() / truth.norm())


@pytest.mark.parametrize("kernels", ["merged", "joined"])
def test_attention(kernels: str) -> None:
    tree, size, heads, key_heads = layout(), 256, 40, 8
    query = draw(1, TOTAL, heads, size).transpose(1, 2).requires_grad_()
    key, value = (draw(1, TOTAL, key_heads, size, seed=n).transpose(1, 2).requires_grad_() for n in (1, 2))
    weights = draw(len(ROWS), heads, size, seed=3)
    out = tree_attention(query, key, value, tree, size**-0.5, kernels)
    grad = torch.zeros_like(out)
    grad[0, ROWS] = weights
    found = torch.autograd.grad(out, [query, key, value], grad)
    few = [x.detach()[0].float().requires_grad_() for x in (query[:, :, ROWS], key, value)]
    column = torch.arange(TOTAL, device="cuda")
    row = torch.tensor(ROWS, device="cuda")[:, None]
    seen = (column <= row) & (row < tree.visible_until)
    for group in range(key_heads):  # all heads together would not fit
        of = slice(group * heads // key_heads, (group + 1) * heads // key_heads)
        scores = torch.einsum("hrd,cd->hrc", few[0][of], few[1][group]) * size**-0.5
        wanted = torch.einsum("hrc,cd->hrd", scores.masked_fill(~seen, float("-inf")).softmax(-1), few[2][group])
        assert error(out[0, ROWS, of].detach().transpose(0, 1), wanted.detach()) < 1e-2
        wanted.backward(weights[:, of].transpose(0, 1).float())
    for mine, theirs in zip((found[0][0][:, ROWS], found[1][0], found[2][0]), few, strict=True):
        assert theirs.grad is not None
        assert error(mine, theirs.grad) < 1e-2


@pytest.mark.parametrize("kernels", ["fla", "fla_segments", "fla_forest"])
def test_convolution(kernels: str) -> None:
    pytest.importorskip("fla")
    tree, x = layout(), draw(TOTAL, WIDTH).requires_grad_()
    weight, grad = draw(WIDTH, 4, seed=1), draw(TOTAL, WIDTH, seed=2)
    out = tree_conv(x, weight, None, tree, kernels=kernels)
    (found,) = torch.autograd.grad(out, [x], grad)
    begin = TOTAL - LENGTH
    few = torch.cat([x.detach()[PREFIX - 3 : PREFIX], x.detach()[begin:]]).float().requires_grad_()
    wide = torch.nn.functional.conv1d(few.t()[None], weight.float()[:, None], groups=WIDTH)[0].t()
    wanted = torch.nn.functional.silu(wide)
    assert error(out.detach()[begin:], wanted.detach()) < 1e-2
    wanted.backward(grad[begin:].float())
    assert few.grad is not None
    assert error(found[begin:], few.grad[3:]) < 1e-2


def test_masks_in_registers() -> None:
    pytest.importorskip("triton")
    x, a, up = draw(TOTAL, WIDTH), draw(8, WIDTH, seed=1), draw(TOTAL, 8, seed=2)
    drawn = Draw(1 << 50 | 77, 4096, 3277)
    low = counted.down(x, a, drawn)
    into = torch.empty_like(x)
    of_a = counted.back(up, x, a, drawn, into, False)
    total = torch.zeros_like(of_a)
    for first in range(0, TOTAL, 8000):
        rows = slice(first, min(first + 8000, TOTAL))
        stays = counted.keep(drawn._replace(first_row=4096 + first), rows.stop - first, WIDTH, x.device)
        kept = torch.where(stays, x[rows].float(), 0.0)
        assert error(low[rows], kept @ a.float().T) < 1e-2
        assert error(into[rows], torch.where(stays, up[rows].float() @ a.float(), 0.0)) < 1e-2
        total += up[rows].float().T @ kept
    assert error(of_a, total) < 1e-3
