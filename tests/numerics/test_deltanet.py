"""Convolution and delta rule over a forest against every root path alone, token by token: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from configs.errors import UserError
from prefix_train import chunked, deltanet
from prefix_train.deltanet import resolve_kernels, tree_conv, tree_delta_rule
from prefix_train.groups import Group
from prefix_train.layout import Layout
from tests import trees
from tests.alone import (
    CHANNELS,
    CONV_NAMES,
    KEY,
    RULE_NAMES,
    VALUE,
    VALUE_HEADS,
    conv_alone,
    conv_inputs,
    conv_truth,
    draws,
    rule_inputs,
    rule_truth,
    widened,
    with_gradients,
)

TREES = [*trees.SHAPES.values(), *(trees.random_tree(seed, 1 + seed % 5) for seed in range(6))]
BOUNDS = [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 1.5e-2)]


def convolve(of: list[Tensor], layout: Layout) -> Tensor:
    return tree_conv(of[0], of[1], of[2] if len(of) > 2 else None, layout)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_convolution_equals_every_path_alone(dtype: torch.dtype, bound: float) -> None:
    for tree in TREES:
        layout = Layout.from_tree(*tree)
        of = conv_inputs(layout, dtype)
        grad = draws(1, (layout.total, CHANNELS))[0].to(dtype).double()
        found = with_gradients(convolve(of, layout), of, grad)
        assert all(x.dtype == dtype for x in found)
        trees.assert_close(found, conv_truth(layout, of, grad), bound, CONV_NAMES)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_convolution_of_other_widths(width: int) -> None:
    for tree in (trees.FIVE_DEEP, trees.SHAPES["chain of single tokens"], trees.MANY_SHORT):
        layout = Layout.from_tree(*tree, width=width)
        of = conv_inputs(layout, torch.float64, width, bias=False)
        grad = draws(1, (layout.total, CHANNELS))[0]
        found = with_gradients(convolve(of, layout), of, grad)
        trees.assert_close(found, conv_truth(layout, of, grad), 1e-12, CONV_NAMES[:3])


def test_convolution_without_activation() -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    x, weight, bias = conv_inputs(layout, torch.float64)
    linear = tree_conv(x, weight, bias, layout, activation=None)
    assert trees.relative(F.silu(linear), tree_conv(x, weight, bias, layout)) < 1e-14
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        tree_conv(x, weight, bias, layout, activation="gelu")


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_delta_rule_equals_every_path_alone(dtype: torch.dtype, bound: float) -> None:
    for tree in TREES:
        layout = Layout.from_tree(*tree)
        of = rule_inputs(layout, dtype)
        grad = draws(2, (1, layout.total, VALUE_HEADS, VALUE))[0].to(dtype).double()
        found = with_gradients(tree_delta_rule(*of, layout), of, grad)
        assert [x.dtype for x in found] == [dtype, *(x.dtype for x in of)]
        expected = rule_truth(layout, of, grad)
        if layout.total == 1:
            # Nothing decays before the only token: its decay has no gradient.
            assert found.pop(4).norm() == expected.pop(4).norm() == 0
        trees.assert_close(found, expected, bound, RULE_NAMES if len(found) == 6 else (*RULE_NAMES[:4], "beta"))


@pytest.mark.parametrize("most", [1, 2, 7])
def test_groups_of_a_level(most: int) -> None:
    """A level in several calls: nothing changes, and each call's states stay within the limit."""
    for tree in (trees.MANY_SHORT, trees.FIVE_DEEP, trees.random_tree(3, 4, 30)):
        layout = Layout.from_tree(*tree, group=most)
        of = rule_inputs(layout, torch.float64)
        grad = draws(2, (1, layout.total, VALUE_HEADS, VALUE))[0]
        whole = with_gradients(tree_delta_rule(*of, Layout.from_tree(*tree)), of, grad)
        trees.assert_close(with_gradients(tree_delta_rule(*of, layout), of, grad), whole, 1e-13, RULE_NAMES)


def test_gathered_states_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.from_tree(*trees.MANY_SHORT)
    of = rule_inputs(layout, torch.float32)
    monkeypatch.setattr(deltanet, "MAX_STATE_BYTES", 10 * VALUE_HEADS * KEY * VALUE * 4)
    with pytest.raises(ValueError, match=r"Layout.from_tree\(..., group=10\)"):
        tree_delta_rule(*of, layout)
    tree_delta_rule(*of, Layout.from_tree(*trees.MANY_SHORT, group=10))


def test_fast_decay_is_finite() -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    of = rule_inputs(layout, torch.float64)
    of[3] = (of[3].detach() * 2000).requires_grad_()
    grad = draws(2, (1, layout.total, VALUE_HEADS, VALUE))[0]
    found = with_gradients(tree_delta_rule(*of, layout), of, grad)
    trees.assert_close(found, rule_truth(layout, of, grad), 1e-12, RULE_NAMES)


def error_of_decays(monkeypatch: pytest.MonkeyPatch, sums: torch.dtype) -> float:
    """Error, in float32, of the gradient of each head's decay rate, as `A_log` is one: heads that forget fast."""
    monkeypatch.setattr(chunked, "SUMS", sums)
    layout = Layout.from_tree([130, 70], [-1, 0])
    of, (grad,) = rule_inputs(layout, torch.float32), draws(1, (1, layout.total, VALUE_HEADS, VALUE))
    found = []
    for query, key, value, g, beta in (of, widened(of)):
        rate = torch.full((VALUE_HEADS,), 5.0, dtype=g.dtype, requires_grad=True)
        out = tree_delta_rule(query, key, value, g * rate.exp(), beta, layout)
        found += torch.autograd.grad(out, rate, grad.to(out.dtype))
    return trees.relative(*found)


def test_sums_of_decays_keep_their_small_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of_decays(monkeypatch, torch.float64) < 2e-6
    assert error_of_decays(monkeypatch, torch.float32) > 1e-5


def test_equals_transformers_on_one_segment() -> None:
    """The same chunks of the same mathematics: float32 rounding apart, nothing differs."""
    layout = Layout.from_tree([200], [-1])
    of = [x.detach() for x in rule_inputs(layout, torch.float32)]
    theirs = torch_chunk_gated_delta_rule(*of, use_qk_l2norm_in_kernel=True)[0]
    assert trees.relative(tree_delta_rule(*of, layout), theirs) < 1e-6


def two_thousand(dtype: torch.dtype = torch.bfloat16) -> tuple[Layout, Tensor, Tensor]:
    """2,000 children of one prefix, all of whose gradients have one sign."""
    layout = Layout.from_tree([5, *[1] * 2000], [-1, *[0] * 2000])
    x, weight = (x.abs().to(dtype) for x in draws(3, (layout.total, 3), (3, 4)))
    return layout, x.requires_grad_(), weight


def test_two_thousand_copies_of_a_row_add_up_in_float32() -> None:
    layout, x, weight = two_thousand()
    grad = torch.ones(layout.total, 3, dtype=torch.float64)
    found = torch.autograd.grad(tree_conv(x, weight, None, layout), x, grad.bfloat16())[0]
    expected = conv_truth(layout, [x, weight], grad)[1]
    trees.assert_close([found[:5]], [expected[:5]], 4e-3, ["x"])


def test_two_thousand_copies_fail_in_bf16() -> None:
    """A plain gather: its backward adds in bf16, and the sum stops growing."""
    layout, x, weight = two_thousand()
    history = layout.history
    buffer = torch.zeros(history.rows, 3, dtype=torch.bfloat16).index_copy(0, history.kept, x)
    buffer = buffer.index_copy(0, history.copy_to, x[history.copy_from])
    out = conv_alone(buffer, weight, None)[history.kept]
    found = torch.autograd.grad(out, x, torch.ones_like(out))[0]
    expected = conv_truth(layout, [x, weight], torch.ones(layout.total, 3, dtype=torch.float64))[1]
    assert trees.relative(found[:5], expected[:5]) > 0.1


def test_two_thousand_children_of_a_state() -> None:
    layout = Layout.from_tree([5, *[1] * 2000], [-1, *[0] * 2000], group=700)
    of = [x.detach().abs() for x in rule_inputs(layout, torch.bfloat16)]
    of[3] = -of[3]
    of = [x.requires_grad_() for x in of]
    grad = torch.ones(1, layout.total, VALUE_HEADS, VALUE, dtype=torch.float64)
    found = with_gradients(tree_delta_rule(*of, layout), of, grad)
    wide = widened(of)
    expected = with_gradients(tree_delta_rule(*wide, layout), wide, grad)
    trees.assert_close([x[:, :5] for x in found], [x[:, :5] for x in expected], 6e-3, RULE_NAMES)


def test_sums_are_the_same_every_time() -> None:
    layout = Layout.from_tree(*trees.MANY_SHORT)
    conv, rule = conv_inputs(layout, torch.float32), rule_inputs(layout, torch.float32)
    grads = draws(5, (layout.total, CHANNELS), (1, layout.total, VALUE_HEADS, VALUE))
    for mix, of, grad in (convolve, conv, grads[0]), (lambda x, y: tree_delta_rule(*x, y), rule, grads[1]):
        first, second = (with_gradients(mix(of, layout), of, grad) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


Mixer = Callable[[list[Tensor], Layout, Layout], Tensor]


def conv_mixer(of: list[Tensor], conv_layout: Layout, rule_layout: Layout) -> Tensor:
    return tree_conv(of[0][0], of[1], None, conv_layout)[None]


def rule_mixer(of: list[Tensor], conv_layout: Layout, rule_layout: Layout) -> Tensor:
    return after_convolution(of, of[0], rule_layout)


def both_mixers(of: list[Tensor], conv_layout: Layout, rule_layout: Layout) -> Tensor:
    return after_convolution(of, tree_conv(of[0][0], of[1], None, conv_layout)[None], rule_layout)


def after_convolution(of: list[Tensor], mixed: Tensor, layout: Layout) -> Tensor:
    query, key, value = (x.unflatten(-1, (-1, 8)) for x in mixed.split([16, 16, 32], -1))
    return tree_delta_rule(query, key, value, of[2], of[3], layout).flatten(2)


def layer_inputs(layout: Layout, dtype: torch.dtype) -> list[Tensor]:
    """Of a Gated DeltaNet layer after its projections: mixed [1, T, 64], taps, g, beta."""
    shapes = [(1, layout.total, 64), (64, 4), (1, layout.total, 4), (1, layout.total, 4)]
    mixed, taps, a, b = draws(11, *shapes)
    made = [mixed.to(dtype), taps.to(dtype), (-0.05 * F.softplus(a)).float().to(dtype), b.sigmoid().to(dtype)]
    return [x.requires_grad_() for x in made]


def layer_truth(mix: Mixer, layout: Layout, of: list[Tensor]) -> Tensor:
    """Every root path through the same mixer, as a pack of its own."""

    def along_path(*inputs: Tensor) -> Tensor:
        alone = Layout.from_tree([len(inputs[0])], [-1])
        return mix([inputs[0][None], of[1], inputs[1][None], inputs[2][None]], alone, alone)[0]

    return trees.standalone(layout, along_path, of[0][0], of[2][0], of[3][0])[None]


def changes_elsewhere(mix: Mixer, layout: Layout, conv: Layout, rule: Layout, dtype: torch.dtype, segment: int) -> bool:
    """Does another token's output or gradient change when `segment`, whose own output has no weight, changes?"""
    start, stop = layout.starts[segment], layout.starts[segment] + layout.lengths[segment]
    others = torch.tensor([row for row in range(layout.total) if not start <= row < stop])
    of = layer_inputs(layout, dtype)
    changed = [x.detach().clone() for x in of]
    changed[0][:, start:stop] = changed[0][:, start:stop].flip(2) * -1.5 + 0.25
    changed[2][:, start:stop] *= 0.5
    changed[3][:, start:stop] *= 0.5
    results = []
    for given in (of, [x.requires_grad_() for x in changed]):
        out = mix(given, conv, rule)
        grad = draws(12, tuple(out.shape))[0].to(dtype)
        grad[:, start:stop] = 0
        gradients = torch.autograd.grad(out, given, grad, allow_unused=True)
        per_token = [x for x in gradients if x is not None and x.dim() == 3]
        whole = [x for x in gradients if x is not None and x.dim() == 2]
        results.append([*(x[:, others] for x in (out, *per_token)), *whole])
    return any(not torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", [conv_mixer, rule_mixer, both_mixers])
def test_r01_one_continuation_reaches_no_other(mix: Mixer, dtype: torch.dtype) -> None:
    for tree in (trees.FORK, trees.MANY_SHORT, trees.FIVE_DEEP):
        layout = Layout.from_tree(*tree)
        for leaf in trees.leaves(layout)[:: 1 + len(layout.lengths) // 12]:
            assert not changes_elsewhere(mix, layout, layout, layout, dtype, leaf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", [conv_mixer, rule_mixer, both_mixers])
def test_r01_fails_without_fix(mix: Mixer, dtype: torch.dtype) -> None:
    layout = Layout.from_tree(*trees.FORK)
    leaky = trees.chain(layout)
    assert changes_elsewhere(mix, layout, leaky, leaky, dtype, 2)


@pytest.mark.parametrize("mix", [conv_mixer, rule_mixer, both_mixers])
def test_r02_convolution_and_delta_rule_each_alone_and_together(mix: Mixer) -> None:
    for tree in (trees.FORK, trees.MANY_SHORT, trees.FIVE_DEEP):
        layout = Layout.from_tree(*tree)
        of = layer_inputs(layout, torch.float64)
        assert trees.relative(mix(of, layout, layout), layer_truth(mix, layout, of)) < 1e-12


@pytest.mark.parametrize(
    ("mix", "leaks"),
    [(conv_mixer, "convolution"), (rule_mixer, "rule"), (both_mixers, "convolution"), (both_mixers, "rule")],
)
def test_r02_fails_without_fix(mix: Mixer, leaks: str) -> None:
    """Boundaries for the one and not for the other: caught for each, alone and together."""
    layout = Layout.from_tree(*trees.FORK)
    leaky = trees.chain(layout)
    conv, rule = (leaky, layout) if leaks == "convolution" else (layout, leaky)
    for dtype in (torch.float64, torch.bfloat16):
        of = layer_inputs(layout, dtype)
        assert trees.relative(mix(of, conv, rule), layer_truth(mix, layout, of)) > 0.05
    assert changes_elsewhere(mix, layout, conv, rule, torch.bfloat16, 2)


def test_resolve_kernels() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_kernels("auto", cpu) == "reference"
    assert resolve_kernels("reference", cuda) == "reference"
    with pytest.raises(UserError, match="'fla' run on CUDA, not on cpu"):
        resolve_kernels("fla", cpu)
    with pytest.raises(UserError, match="'fla_forest' run on CUDA, not on cpu"):
        resolve_kernels("fla_forest", cpu)
    with pytest.raises(UserError, match=r"'fla_forest' take .* not bfloat16 and 5: set model\.deltanet=fla"):
        resolve_kernels("fla_forest", cuda, width=5)
    with pytest.raises(UserError, match=r"'torch' are unknown: .* fla, fla_segments, fla_forest, fla_cuda"):
        resolve_kernels("torch", cpu)


def test_wrong_layouts_and_kernels_are_refused() -> None:
    layout, other = Layout.from_tree([6], [-1]), Layout.from_tree([5], [-1])
    conv, rule = conv_inputs(layout, torch.float32), rule_inputs(layout, torch.float32)
    with pytest.raises(ValueError, match="5 positions, but the convolution got 6"):
        tree_conv(*conv, other)
    with pytest.raises(ValueError, match=r"width 4 over a layout for width 3: .*width=4"):
        tree_conv(*conv, Layout.from_tree([6], [-1], width=3))
    with pytest.raises(ValueError, match=r"5 positions, but the delta rule got \(1, 6\)"):
        tree_delta_rule(*rule, other)
    with pytest.raises(ValueError, match="'cuda'"):
        tree_conv(*conv, layout, kernels="cuda")
    with pytest.raises(ValueError, match="'cuda'"):
        tree_delta_rule(*rule, layout, kernels="cuda")


def test_only_segments_with_children_keep_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[int, ...], int] = {}
    rule = deltanet.chunked.delta_rule

    def counting(*given: object) -> tuple[Tensor, Tensor | None]:
        group: Group = given[-1]  # type: ignore[assignment]
        out, final = rule(*given)  # type: ignore[arg-type]
        kept[group.segments] = 0 if final is None else len(final)
        return out, final

    monkeypatch.setattr(deltanet.chunked, "delta_rule", counting)
    layout = Layout.from_tree(*trees.FORK)
    tree_delta_rule(*rule_inputs(layout, torch.float32), layout)
    assert kept == {(0, 6): 1, (1, 4, 5): 1, (2, 3): 0}
