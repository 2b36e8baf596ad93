"""Tree attention against every root path alone through causal softmax attention: outputs and all gradients."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from configs.errors import UserError
from prefix_train import flex, layer_bytes, pieces
from prefix_train.attention import largest_piece, resolve_kernels, tree_attention
from prefix_train.layout import Layout
from prefix_train.shape import Shape
from tests import trees

NAMES = ("out", "query", "key", "value")
SCALE = 0.3
TREES = [*trees.SHAPES.values(), *(trees.random_tree(seed, 1 + seed % 5) for seed in range(10))]


def inputs(layout: Layout, dtype: torch.dtype, heads: int = 4, groups: int = 2, size: int = 16) -> list[Tensor]:
    """query, key, value as a model gives them: [1, H, T, D], tokens outermost in memory."""
    draw = torch.Generator().manual_seed(layout.total)
    shapes = [(1, layout.total, count, size) for count in (heads, heads // groups, heads // groups)]
    made = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in made]


def weights(layout: Layout, heads: int = 4, size: int = 16) -> Tensor:
    """A gradient of the output, [1, T, H, D]."""
    draw = torch.Generator().manual_seed(7)
    return torch.randn(1, layout.total, heads, size, generator=draw, dtype=torch.float64)


def with_gradients(out: Tensor, of: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, of, grad.to(out.dtype))]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence: [n, Hq, D] on [n, Hk, D] -> [n, Hq, D]."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    scores = query @ key.repeat_interleave(groups, 0).mT * SCALE
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ value.repeat_interleave(groups, 0)).transpose(0, 1)


def truth(layout: Layout, of: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Every root path alone, in float64."""
    wide = [x.detach().double().requires_grad_() for x in of]
    out = trees.standalone(layout, causal, *(x[0].transpose(0, 1) for x in wide))[None]
    return with_gradients(out, wide, grad)


@pytest.mark.parametrize("kernels", ["dense", "merged"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_equals_every_path_alone(kernels: str, dtype: torch.dtype, bound: float) -> None:
    for tree in TREES:
        layout = Layout.from_tree(*tree)
        of, grad = inputs(layout, dtype), weights(layout).to(dtype).double()
        out = tree_attention(*of, layout, SCALE, kernels)
        assert out.shape == (1, layout.total, 4, 16)
        assert out.dtype == dtype
        found = with_gradients(out, of, grad)
        assert all(x.dtype == dtype for x in found)
        expected = truth(layout, of, grad)
        if layout.total == 1:
            # One token attends to itself alone: its query and key have no gradient.
            assert max(x.norm() for x in found[1:3]) < 1e-6
            found, expected = found[::3], expected[::3]
        trees.assert_close(found, expected, bound, NAMES[:: 3 if layout.total == 1 else 1])


@pytest.mark.parametrize("groups", [1, 4])
def test_grouped_heads(groups: int) -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of, grad = inputs(layout, torch.float64, groups=groups), weights(layout)
    found = with_gradients(tree_attention(*of, layout, SCALE, "merged"), of, grad)
    trees.assert_close(found, truth(layout, of, grad), 1e-12, NAMES)


def watch_heads(patch: pytest.MonkeyPatch) -> set[int]:
    """How many heads of keys a piece's backward is given, from now on."""
    seen: set[int] = set()
    backward = pieces.CpuPieces.backward

    def watched(self: pieces.CpuPieces, grad: Tensor, of: pieces.Triple, *rest: Any) -> pieces.Triple:
        seen.add(of[1].shape[1])
        return backward(self, grad, of, *rest)

    patch.setattr(pieces.CpuPieces, "backward", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_heads_some_after_the_others_give_the_same(
    groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few bytes as can be: each head of keys by itself. To the bit where nothing is merged; else to rounding, for a
    CPU's exponential of several numbers at once is not to the bit that of one."""
    for tree in [*TREES, ([37], [-1])]:
        layout = Layout.from_tree(*tree)
        of, grad = inputs(layout, dtype, 8, groups), weights(layout, 8).to(dtype)
        at_once = with_gradients(tree_attention(*of, layout, SCALE, "merged"), of, grad)
        with monkeypatch.context() as patch:
            patch.setattr(layer_bytes, "HEADS_BYTES", 1)
            heads = watch_heads(patch)
            parted = with_gradients(tree_attention(*of, layout, SCALE, "merged"), of, grad)
        assert heads == {1}
        if not layout.rectangles:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(parted, at_once, strict=True))
        trees.assert_close(parted, at_once, {2: 1e-3, 4: 1e-7, 8: 1e-15}[dtype.itemsize], NAMES)
        assert [x.stride() for x in parted] == [x.stride() for x in at_once]


def test_the_largest_piece_is_the_one_that_memory_is_planned_for() -> None:
    for lengths, parents in TREES:
        assert largest_piece(Layout.from_tree(lengths, parents)) == Shape.of(lengths, parents, 1).piece


def test_large_scores_stay_finite() -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of, grad = [(x.detach() * 30).requires_grad_() for x in inputs(layout, torch.float64)], weights(layout)
    found = with_gradients(tree_attention(*of, layout, SCALE, "merged"), of, grad)
    trees.assert_close(found, truth(layout, of, grad), 1e-12, NAMES)


def test_every_piece_gets_the_merged_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of, grad = inputs(layout, torch.float64), weights(layout)
    backward = pieces.CpuPieces.backward

    def own_log_sum_exp(self: pieces.CpuPieces, grad: Tensor, of: tuple, out: Tensor, lse: Tensor, *rest: object):
        out, lse = self.forward(of, *rest)
        return backward(self, grad, of, out, lse, *rest)

    monkeypatch.setattr(pieces.CpuPieces, "backward", own_log_sum_exp)
    found = with_gradients(tree_attention(*of, layout, SCALE, "merged"), of, grad)
    assert min(trees.relative(a, b) for a, b in zip(found[1:], truth(layout, of, grad)[1:], strict=True)) > 0.1


def test_two_thousand_readers_of_one_sign() -> None:
    """The prefix's gradients collect 2,000 contributions of one sign and keep bf16's precision."""
    layout = Layout.from_tree([5, *[1] * 2000], [-1, *[0] * 2000])
    of = [x.detach().abs().requires_grad_() for x in inputs(layout, torch.bfloat16)]
    grad = weights(layout).abs().bfloat16().double()
    found = with_gradients(tree_attention(*of, layout, SCALE, "merged"), of, grad)
    wide = [x.detach().double().requires_grad_() for x in of]
    expected = with_gradients(tree_attention(*wide, layout, SCALE, "dense"), wide, grad)
    trees.assert_close([x[:, :, :5] for x in found[2:]], [x[:, :, :5] for x in expected[2:]], 6e-3, NAMES[2:])
    # Inputs of one sign make the query's gradient a small difference of large numbers.
    trees.assert_close(found[:2], expected[:2], 3e-2, NAMES[:2])


def test_partial_sums_are_float32() -> None:
    """A chain of 200 single tokens: every query's gradient is a sum of up to 200 pieces."""
    layout = Layout.from_tree([1] * 200, range(-1, 199))
    of, grad = inputs(layout, torch.bfloat16), weights(layout).bfloat16().double()
    found = with_gradients(tree_attention(*of, layout, SCALE, "merged"), of, grad)
    # In bf16 the query's would be off by 1e-2.
    trees.assert_close(found, truth(layout, of, grad), 6e-3, NAMES)


def test_nothing_hangs_on_the_context() -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of = inputs(layout, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or len(saved) - 1, lambda i: saved[i]):
        out = tree_attention(*of, layout, SCALE, "merged")
    assert [tuple(x.shape) for x in saved] == [
        *(tuple(x.shape) for x in of),
        tuple(of[0].shape),
        tuple(of[0].shape[:3]),
    ]
    assert not [x for x in vars(out.grad_fn).values() if isinstance(x, Tensor)]


def changes_elsewhere(kernels: str, used: Layout, layout: Layout, of: list[Tensor], segment: int) -> bool:
    """Does another token's output or gradient change when `segment`, whose own output has no weight, changes?"""
    start, stop = layout.starts[segment], layout.starts[segment] + layout.lengths[segment]
    others = torch.tensor([row for row in range(layout.total) if not start <= row < stop])
    grad = weights(layout)
    grad[:, start:stop] = 0
    changed = [x.detach().clone() for x in of]
    for x in changed:
        x[:, :, start:stop] = x[:, :, start:stop].flip(1) * -1.5 + 0.25
    results = []
    for given in (of, [x.requires_grad_() for x in changed]):
        out, *gradients = with_gradients(tree_attention(*given, used, SCALE, kernels), given, grad)
        results.append([out[:, others], *(x[:, :, others] for x in gradients)])
    return any(not torch.equal(a, b) for a, b in zip(*results, strict=True))


ONE_CONTINUATION = ([64, 5, 20, 20, 3, 7], [-1, 0, 1, 1, 0, -1])


@pytest.mark.parametrize("kernels", ["dense", "merged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r01_attention_of_one_continuation_reaches_no_other(kernels: str, dtype: torch.dtype) -> None:
    for tree in (ONE_CONTINUATION, trees.MANY_SHORT, trees.FIVE_DEEP):
        layout = Layout.from_tree(*tree)
        of = inputs(layout, dtype)
        for leaf in trees.leaves(layout)[:: 1 + len(layout.lengths) // 12]:
            assert not changes_elsewhere(kernels, layout, layout, of, leaf)


@pytest.mark.parametrize("kernels", ["dense", "merged"])
def test_r01_attention_fails_without_fix(kernels: str) -> None:
    layout = Layout.from_tree(*ONE_CONTINUATION)
    leaky = trees.chain(layout)
    of = inputs(layout, torch.float32)
    assert changes_elsewhere(kernels, leaky, layout, of, 2)
    grad = weights(layout)
    mine = with_gradients(tree_attention(*of, leaky, SCALE, kernels), of, grad)
    assert trees.relative(mine[0], truth(layout, of, grad)[0]) > 0.01


def test_resolve_kernels() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_kernels("auto", cpu, torch.float32) == "merged"
    assert resolve_kernels("auto", cuda, torch.float32) == resolve_kernels("auto", cuda, torch.float64) == "flex"
    assert resolve_kernels("auto", cuda, torch.bfloat16, 100) == resolve_kernels("flex", cuda) == "flex"
    assert resolve_kernels("dense", cpu) == "dense"
    with pytest.raises(UserError, match="'flex' run on CUDA, not on cpu"):
        resolve_kernels("flex", cpu)
    with pytest.raises(UserError, match="'joined' run on CUDA, not on cpu"):
        resolve_kernels("joined", cpu)
    with pytest.raises(UserError, match=r"'flash' are unknown: write auto, merged, joined, flex, dense"):
        resolve_kernels("flash", cpu)
    layout = Layout.from_tree([4], [-1])
    with pytest.raises(UserError, match="'flex' run on CUDA, not on cpu"):
        tree_attention(*inputs(layout, torch.float32), layout, SCALE, "flex")
    with pytest.raises(ValueError, match="'sdpa'"):
        tree_attention(*inputs(layout, torch.float32), layout, SCALE, "sdpa")


def test_another_layout_is_refused() -> None:
    of = inputs(Layout.from_tree([4], [-1]), torch.float32)
    with pytest.raises(ValueError, match=r"the layout has 5 positions, but attention got \(1, 4, 4, 16\)"):
        tree_attention(*of, Layout.from_tree([5], [-1]), SCALE)


def test_merged_pieces_on_cuda_take_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    class Query:
        device, shape = torch.device("cuda"), (1, 4, 9, 16)

        def __init__(self, dtype: torch.dtype, size: int = 16) -> None:
            self.dtype, self.shape = dtype, (1, 4, 9, size)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert isinstance(pieces.pieces_for(Query(torch.bfloat16)), pieces.CudaPieces)
    for query in (Query(torch.float32), Query(torch.bfloat16, 12), Query(torch.bfloat16, 264)):
        with pytest.raises(UserError, match="'merged' on CUDA take bfloat16"):
            pieces.pieces_for(query)


@pytest.mark.parametrize("block", [1, 4, 64, 128])
def test_blocks_seen(block: int) -> None:
    for tree in TREES:
        layout = Layout.from_tree(*tree)
        count = -(-layout.total // block)
        padded = torch.zeros(count * block, count * block, dtype=torch.bool)
        padded[: layout.total, : layout.total] = layout.visible()
        tiles = padded.view(count, block, count, block).transpose(1, 2).flatten(2)
        seen, in_full = (torch.from_numpy(x) for x in flex.blocks_seen(layout, block))
        assert torch.equal(seen, tiles.any(-1))
        assert torch.equal(in_full, tiles.all(-1))


def test_block_mask_is_the_one_that_flex_attention_would_make() -> None:
    for tree in ([[300, *[70] * 9], [-1, *[0] * 9]], trees.FIVE_DEEP):
        layout = Layout.from_tree(*tree)
        mine = flex.block_mask(layout)
        made = create_block_mask(mine.mask_mod, None, None, layout.total, layout.total, device="cpu")
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mine, name), getattr(made, name)), name
        for kind in ("kv", "full_kv", "q", "full_q"):
            for row, count in enumerate(getattr(made, f"{kind}_num_blocks")[0, 0].tolist()):
                blocks = [getattr(x, f"{kind}_indices")[0, 0, row, :count].sort().values for x in (mine, made)]
                assert torch.equal(*blocks), (kind, row)
        assert mine.seq_lengths == made.seq_lengths


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_that_mask() -> None:
    """FlexAttention itself, uncompiled: it has a forward on the CPU."""
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of = [x.detach() for x in inputs(layout, torch.float32)]
    out = flex.torch_flex_attention(*of, block_mask=flex.block_mask(layout), scale=SCALE, enable_gqa=True)
    assert trees.relative(out.transpose(1, 2), tree_attention(*of, layout, SCALE, "dense")) < 1e-6


def bytes_per_pair_of_blocks(make: Callable[[Layout], object], layout: Layout) -> float:
    """Most memory that `make` takes at once, per pair of blocks."""
    tracemalloc.start()
    make(layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (layout.total / flex.BLOCK) ** 2


def test_r19_no_mask_of_all_pairs() -> None:
    """144,000 positions, of which all pairs would be 19 GiB."""
    layout = Layout.from_tree([64000, *[1000] * 80], [-1, *[0] * 80])
    begin = time.process_time()
    flex.blocks_seen(layout)
    assert time.process_time() - begin < 1.0
    assert bytes_per_pair_of_blocks(flex.blocks_seen, layout) < 40


def test_r19_fails_without_fix() -> None:
    def from_all_pairs(layout: Layout) -> object:
        token = np.arange(layout.total)
        seen = (token <= token[:, None]) & (token[:, None] < layout.visible_until.numpy())
        return np.add.reduceat(np.add.reduceat(seen, token[:: flex.BLOCK]), token[:: flex.BLOCK], 1)

    layout = Layout.from_tree([640, *[10] * 160], [-1, *[0] * 160])
    assert bytes_per_pair_of_blocks(from_all_pairs, layout) > 10000
