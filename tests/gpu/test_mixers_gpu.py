"""The token mixers' CUDA kernels against the references in float64, on the same numbers."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_train import flex, pieces
from prefix_train.attention import tree_attention
from prefix_train.deltanet import tree_conv, tree_conv_parts, tree_delta_rule
from prefix_train.layout import Layout
from tests import trees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LONG = ([1000, 300, 65, 1, 200, 77, 500, 3, 129], [-1, 0, 1, 1, 0, 0, -1, 6, 6])
TREES = [LONG, trees.FIVE_DEEP, trees.MANY_SHORT, trees.random_tree(4, 5)]
ATTENTION_NAMES = ("out", "query", "key", "value")
RULE_NAMES = ("out", "query", "key", "value", "g", "beta")
CONV_NAMES = ("out", "x", "weight", "bias")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers that bf16 holds exactly, so that every precision starts from the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to("cuda", dtype)


def with_gradients(out: Tensor, of: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, of, grad.to(out.dtype))]


def widened(of: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in of]


def attention_inputs(layout: Layout, size: int, groups: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    heads = 8
    counts = (heads, heads // groups, heads // groups)
    made = [draw(1, layout.total, count, size, seed=seed, dtype=dtype) for seed, count in enumerate(counts, 1)]
    return [x.transpose(1, 2).requires_grad_() for x in made]


def rule_inputs(layout: Layout, size: int = 64, dtype: torch.dtype = torch.bfloat16, most: float = 1.0) -> list[Tensor]:
    """most: of beta; above one a state may change its sign."""
    total = layout.total
    query, key, value = (draw(1, total, heads, size, seed=heads + i, dtype=dtype) for i, heads in enumerate((2, 2, 4)))
    g = -0.05 * F.softplus(draw(1, total, 4, seed=7, dtype=torch.promote_types(dtype, torch.float32)))
    beta = draw(1, total, 4, seed=8, dtype=dtype).sigmoid() * most
    return [x.requires_grad_() for x in (query, key, value, g, beta)]


def conv_inputs(layout: Layout, channels: int = 96) -> list[Tensor]:
    return [
        x.requires_grad_() for x in (draw(layout.total, channels), draw(channels, 4, seed=1), draw(channels, seed=2))
    ]


@pytest.mark.parametrize("kernels", ["merged", "joined"])
@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize(("size", "groups"), [(64, 1), (128, 4), (256, 4)])
def test_pieces_of_attention(
    monkeypatch: pytest.MonkeyPatch, cudnn: bool, size: int, groups: int, kernels: str
) -> None:
    if cudnn and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN's kernels are used on Hopper")
    monkeypatch.setattr("prefix_train.attention.pieces_for", lambda query: pieces.CudaPieces(cudnn))
    for tree in TREES:
        layout = Layout.from_tree(*tree).to("cuda")
        of, grad = attention_inputs(layout, size, groups), draw(1, layout.total, 8, size)
        found = with_gradients(tree_attention(*of, layout, size**-0.5, kernels), of, grad)
        wide = widened(of)
        truth = with_gradients(tree_attention(*wide, layout, size**-0.5, "dense"), wide, grad)
        trees.assert_close(found, truth, 1e-2, ATTENTION_NAMES)


def test_joining_rounds_no_more_than_merging() -> None:
    """Over all of these forests together: no further from float64 than 1.05 times the merged pieces."""
    squares = {"merged": 0.0, "joined": 0.0}
    for tree in TREES:
        layout = Layout.from_tree(*tree).to("cuda")
        of, grad = attention_inputs(layout, 128, 4), draw(1, layout.total, 8, 128)
        wide = widened(of)
        truth = with_gradients(tree_attention(*wide, layout, 0.09, "dense"), wide, grad)
        for kernels in squares:
            found = with_gradients(tree_attention(*of, layout, 0.09, kernels), of, grad)
            squares[kernels] += sum(trees.relative(a, b) ** 2 for a, b in zip(found, truth, strict=True))
    print(json.dumps(squares))
    assert squares["joined"] <= 1.05**2 * squares["merged"]


def test_kernels_of_this_device() -> None:
    query = attention_inputs(Layout.from_tree([128], [-1]), 256, 1)[0]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert pieces.pieces_for(query).cudnn == (hopper and torch.backends.cudnn.version() >= 91000)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-3)])
def test_flex_attention(dtype: torch.dtype, bound: float) -> None:
    for tree in (LONG, trees.FIVE_DEEP):
        layout = Layout.from_tree(*tree).to("cuda")
        of, grad = attention_inputs(layout, 64, 4, dtype), draw(1, layout.total, 8, 64)
        found = with_gradients(tree_attention(*of, layout, 0.125, "flex"), of, grad)
        wide = widened(of)
        truth = with_gradients(tree_attention(*wide, layout, 0.125, "dense"), wide, grad)
        trees.assert_close(found, truth, bound, ATTENTION_NAMES)


def test_r19_block_mask_costs_little() -> None:
    """144,000 positions: made in well under 2% of a step, and no tensor of all pairs."""
    layout = Layout.from_tree([64000, *[1000] * 80], [-1, *[0] * 80]).to("cuda")
    flex.block_mask(Layout.from_tree([64], [-1]).to("cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    flex.block_mask(layout)
    end.record()
    end.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
    assert begin.elapsed_time(end) < 500


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize(("most", "size"), [(2, 64), (128, 128)])
def test_delta_rule_of_flash_linear_attention(most: int, size: int, beta: float) -> None:
    pytest.importorskip("fla")
    for tree in TREES:
        layout = Layout.from_tree(*tree, group=most).to("cuda")
        of, grad = rule_inputs(layout, size, most=beta), draw(1, layout.total, 4, size)
        found = with_gradients(tree_delta_rule(*of, layout, kernels="fla"), of, grad)
        wide = widened(of)
        truth = with_gradients(tree_delta_rule(*wide, layout, kernels="reference"), wide, grad)
        trees.assert_close(found, truth, 2e-2, RULE_NAMES)


@pytest.mark.parametrize("kernels", ["fla", "fla_segments", "fla_forest", "fla_cuda"])
def test_convolutions(kernels: str) -> None:
    pytest.importorskip({"fla_cuda": "causal_conv1d", "fla_forest": "triton"}.get(kernels, "fla"))
    for tree in TREES:
        layout = Layout.from_tree(*tree).to("cuda")
        of, grad = conv_inputs(layout), draw(layout.total, 96)
        found = with_gradients(tree_conv(*of, layout, kernels=kernels), of, grad)
        wide = widened(of)
        truth = with_gradients(tree_conv(*wide, layout), wide, grad)
        trees.assert_close(found, truth, 1e-2, CONV_NAMES)


def test_our_convolution_rounds_no_more_than_the_others() -> None:
    """Over all of these forests together, output and gradient of the input; and float32 to its own precision."""
    pytest.importorskip("fla")
    squares = dict.fromkeys(("fla", "fla_segments", "fla_forest"), 0.0)
    for tree in TREES:
        layout = Layout.from_tree(*tree).to("cuda")
        of, grad = conv_inputs(layout, 1320), draw(layout.total, 1320)
        wide = widened(of)
        truth = with_gradients(tree_conv(*wide, layout), wide, grad)
        for kernels in squares:
            found = with_gradients(tree_conv(*of, layout, kernels=kernels), of, grad)
            squares[kernels] += sum(trees.relative(a, b) ** 2 for a, b in zip(found[:2], truth[:2], strict=True))
        single = [x.detach().float().requires_grad_() for x in of]
        found = with_gradients(tree_conv(*single, layout, kernels="fla_forest"), single, grad)
        trees.assert_close(found, truth, 2e-6, CONV_NAMES)
    print(json.dumps(squares))
    assert squares["fla_forest"] <= 1.001 * min(squares.values())


def test_our_convolution_takes_rows_of_a_wider_tensor_and_gives_parts() -> None:
    pytest.importorskip("triton")
    layout, sizes = Layout.from_tree(*LONG).to("cuda"), [512, 264, 40]
    x, weight, _ = conv_inputs(layout, sum(sizes))
    wide = torch.zeros(layout.total, sum(sizes) + 24, dtype=x.dtype, device="cuda")
    strided = wide.detach()[:, 8 : 8 + sum(sizes)].copy_(x.detach()).requires_grad_()
    grad = draw(layout.total, sum(sizes))
    parts = tree_conv_parts(strided, weight, None, layout, sizes, kernels="fla_forest")
    assert all(part.is_contiguous() for part in parts)
    found = with_gradients(torch.cat(parts, 1), [strided, weight], grad)
    wanted = with_gradients(tree_conv(x, weight, None, layout, kernels="fla_forest"), [x, weight], grad)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_references_equal_those_on_the_cpu(dtype: torch.dtype, bound: float) -> None:
    host = Layout.from_tree(*trees.FIVE_DEEP)
    layout = host.to("cuda")
    rule, conv = rule_inputs(layout, dtype=dtype), [x.detach().to(dtype).requires_grad_() for x in conv_inputs(layout)]
    for mix, of, width in (
        (lambda x, where: tree_delta_rule(*x, where), rule, (1, layout.total, 4, 64)),
        (lambda x, where: tree_conv(*x, where), conv, (layout.total, 96)),
    ):
        grad = draw(*width, dtype=dtype)
        on_cpu = [x.detach().cpu().requires_grad_() for x in of]
        expected = with_gradients(mix(on_cpu, host), on_cpu, grad.cpu())
        found = [x.cpu() for x in with_gradients(mix(of, layout), of, grad)]
        trees.assert_close(found, expected, bound, [str(i) for i in range(len(found))])


@pytest.mark.parametrize("kernels", ["reference", "fla_forest"])
def test_two_thousand_children_of_one_sign(kernels: str) -> None:
    layout = Layout.from_tree([5, *[1] * 2000], [-1, *[0] * 2000]).to("cuda")
    of = [x.detach().abs().requires_grad_() for x in conv_inputs(layout)]
    grad = torch.ones(layout.total, 96, device="cuda")
    found = with_gradients(tree_conv(*of, layout, kernels=kernels), of, grad)
    wide = widened(of)
    truth = with_gradients(tree_conv(*wide, layout), wide, grad)
    trees.assert_close([found[1][:5]], [truth[1][:5]], 4e-3, ["x"])
    again = with_gradients(tree_conv(*of, layout, kernels=kernels), of, grad)
    assert torch.equal(found[1], again[1])


def test_layout_moves_whole() -> None:
    layout = Layout.from_tree(*LONG)
    moved = layout.to("cuda", non_blocking=True)
    for part, same in zip(layout._parts(), moved._parts(), strict=True):
        for name in part.TABLES:
            assert getattr(same, name).is_cuda
            assert torch.equal(getattr(part, name), getattr(same, name).cpu()), name


@pytest.mark.parametrize("attention", ["merged", "joined", "flex"])
@pytest.mark.parametrize("deltanet", ["reference", "fla", "fla_segments", "fla_forest"])
def test_no_layer_waits_for_the_device(attention: str, deltanet: str) -> None:
    if deltanet != "reference":
        pytest.importorskip("fla")
    layout = Layout.from_tree(*LONG).to("cuda")
    conv, rule, of = conv_inputs(layout), rule_inputs(layout), attention_inputs(layout, 64, 4)

    def layer() -> None:
        tree_conv(*conv, layout, kernels=deltanet).sum().backward()
        tree_delta_rule(*rule, layout, kernels=deltanet).sum().backward()
        tree_attention(*of, layout, 0.125, attention).sum().backward()

    # The first pass compiles, tunes and makes the block mask.
    layer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
