"""What goes into flash-linear-attention's kernels and comes out of them, with stand-ins that compute on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train import deltanet, flash_linear, kernel_choice, machine, trial
from prefix_train.deltanet import tree_conv, tree_conv_parts, tree_delta_rule
from prefix_train.geometry import Geometry, read_config
from prefix_train.groups import CHUNK
from prefix_train.layout import Layout
from tests import trees
from tests.alone import (
    CHANNELS,
    CONV_NAMES,
    RULE_NAMES,
    VALUE,
    VALUE_HEADS,
    conv_alone,
    conv_inputs,
    conv_truth,
    draws,
    recurrence,
    rule_inputs,
    rule_truth,
    with_gradients,
)
from tests.unit.test_kernels import CONFIG, TINY

CPU = torch.device("cpu")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name.split('.')[0]!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    layout = Layout.from_tree([6], [-1])
    for mix in (
        lambda: tree_conv(*conv_inputs(layout, torch.float32), layout, kernels="fla"),
        lambda: tree_delta_rule(*rule_inputs(layout, torch.float32), layout, kernels="fla"),
    ):
        with pytest.raises(UserError, match=r"need flash-linear-attention, which cannot be imported here .*'fla'"):
            mix()


def stand_in(module: str, name: str) -> Callable[..., object]:
    """flash-linear-attention's functions as its documentation describes them, token by token."""

    def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, None]:
        assert activation == "silu"
        return conv_alone(x[0], weight, bias)[None], None

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
        chunk_indices: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        assert use_qk_l2norm_in_kernel
        assert len(q) == 1
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        assert cu_seqlens[-1] == q.shape[1]
        ranges = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
        chunks = [[i, c] for i, (begin, end) in enumerate(ranges) for c in range(-(-(end - begin) // CHUNK))]
        assert chunk_indices.tolist() == chunks
        if initial_state is None:
            initial_state = torch.zeros(len(ranges), v.shape[2], k.shape[3], v.shape[3])
        parts = [
            recurrence(*(x[0, begin:end].float() for x in (q, k, v, g, beta)), state)
            for (begin, end), state in zip(ranges, initial_state, strict=True)
        ]
        out = torch.cat([out for out, _ in parts]).to(q.dtype)[None]
        return out, torch.stack([state for _, state in parts]) if output_final_state else None

    def of_segments(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, bounds: Tensor) -> Tensor:
        assert states.dtype == torch.float32
        ranges = zip(bounds[:-1].tolist(), bounds[1:].tolist(), states, strict=True)
        parts = [torch.cat([state[:, 1:].t(), x[0, begin:end]]) for begin, end, state in ranges]
        warm_up = weight.shape[1] - 1
        return torch.cat([conv_alone(part, weight, bias)[warm_up:] for part in parts])[None]

    def causal_conv1d_fwd(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: None,
        initial_state: Tensor,
        activation: str,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
        chunk_indices: Tensor,
    ) -> tuple[Tensor, None]:
        assert activation == "silu"
        assert x.stride(2) == 1
        assert all(one.is_contiguous() for one in (weight, initial_state))
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        chunks = [[i, c] for i, n in enumerate(cu_seqlens.diff().tolist()) for c in range(-(-n // CHUNK))]
        assert chunk_indices.tolist() == chunks
        return of_segments(x, weight, bias, initial_state, cu_seqlens), None

    def causal_conv1d_bwd(x: Tensor, dy: Tensor, dht: None, **given: Any) -> tuple[Tensor | None, ...]:
        tensors = (x, given["weight"], given["bias"], given["initial_state"])
        of = [None if one is None else one.detach().requires_grad_() for one in tensors]
        with torch.enable_grad():
            out = of_segments(*of, given["cu_seqlens"])
        found = iter(torch.autograd.grad(out, [one for one in of if one is not None], dy))
        dx, dw, db, dh0 = (None if one is None else next(found) for one in of)
        return dx, dw, db, None, dh0

    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor, activation: str) -> Tensor:
        assert activation == "silu"
        assert seq_idx.dtype == torch.int32
        assert x.stride(1) == 1
        runs = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = torch.split(x[0].t(), runs)
        return torch.cat([conv_alone(part, weight, bias) for part in parts]).t()[None]

    return {
        "causal_conv1d": causal_conv1d,
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_fwd": causal_conv1d_fwd,
        "causal_conv1d_bwd": causal_conv1d_bwd,
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
    }[name]


@pytest.mark.parametrize("most", [2, 128])
def test_calls_of_flash_linear_attention(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(flash_linear, "_import", stand_in)
    layout = Layout.from_tree(*trees.FIVE_DEEP, group=most)
    of = rule_inputs(layout, torch.float32)
    grad = draws(2, (1, layout.total, VALUE_HEADS, VALUE))[0]
    found = with_gradients(tree_delta_rule(*of, layout, kernels="fla"), of, grad)
    trees.assert_close(found, rule_truth(layout, of, grad), 5e-6, RULE_NAMES)


@pytest.mark.parametrize("kernels", ["fla", "fla_segments", "fla_cuda"])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_calls_of_the_convolutions(monkeypatch: pytest.MonkeyPatch, kernels: str, width: int) -> None:
    monkeypatch.setattr(flash_linear, "_import", stand_in)
    for tree in (trees.FIVE_DEEP, trees.MANY_SHORT, ([70, 1, 2, 130], [-1, 0, 1, 0])):
        layout = Layout.from_tree(*tree, width=width)
        conv = conv_inputs(layout, torch.float32, width)
        grad = draws(1, (layout.total, CHANNELS))[0]
        found = with_gradients(tree_conv(*conv, layout, kernels=kernels), conv, grad)
        trees.assert_close(found, conv_truth(layout, conv, grad), 5e-6, CONV_NAMES)


@pytest.mark.parametrize("kernels", ["reference", "fla_segments"])
def test_channels_in_parts(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(flash_linear, "_import", stand_in)
    layout, sizes = Layout.from_tree(*trees.FIVE_DEEP), [6, 6, CHANNELS - 12]
    conv = conv_inputs(layout, torch.float32)
    grad = draws(1, (layout.total, CHANNELS))[0]
    parts = tree_conv_parts(*conv, layout, sizes, kernels=kernels)
    assert [part.shape[1] for part in parts] == sizes
    assert all(part.is_contiguous() for part in parts) == (kernels == "fla_segments")
    found = with_gradients(torch.cat(parts, 1), conv, grad)
    trees.assert_close(found, conv_truth(layout, conv, grad), 5e-6, CONV_NAMES)


def test_a_trial_launches_the_convolutions_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are searched, pinned and compiled by the channels that they are given."""
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dtype="float32", build=TINY))
    monkeypatch.setattr(flash_linear, "_import", stand_in)
    chosen = kernel_choice.Kernels("merged", "fla_segments", "torch", "torch")
    monkeypatch.setattr(deltanet, "resolve_kernels", lambda *_: chosen.deltanet)
    monkeypatch.setattr(machine, "chosen", lambda *_: chosen)
    given, convolve = list[int](), flash_linear.convolve_segments

    def spied(x: Tensor, *more: Any) -> Tensor:
        given.append(x.shape[1])
        return convolve(x, *more)

    monkeypatch.setattr(flash_linear, "convolve_segments", spied)
    trial.delta_net(config, Geometry.of(read_config(config.model)), trial.LEAST, CPU)
    of_trial = set(given)
    given.clear()
    trial.whole_update(config, trial.LEAST, CPU)
    assert of_trial == set(given) == {16, 32}


def test_inputs_before_a_segment_that_are_forgotten_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_linear, "_import", stand_in)
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    layout.history.absent = torch.arange(len(layout.history.before))
    conv, grad = conv_inputs(layout, torch.float32), draws(1, (layout.total, CHANNELS))[0]
    found = tree_conv(*conv, layout, kernels="fla_segments")
    assert trees.relative(found, conv_truth(layout, conv, grad)[0]) > 0.01


def test_states_of_another_dtype_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_states(module: str, name: str) -> Callable[..., object]:
        def rule(**given: object) -> tuple[Tensor, Tensor]:
            out, final = stand_in(module, "chunk_gated_delta_rule")(**given)  # type: ignore[misc]
            return out, final.bfloat16()

        return rule

    monkeypatch.setattr(flash_linear, "_import", half_states)
    layout = Layout.from_tree(*trees.FORK)
    with pytest.raises(RuntimeError, match=r"final states are torch.bfloat16 \(2, 4, 8, 6\), not float32"):
        tree_delta_rule(*rule_inputs(layout, torch.float32), layout, kernels="fla")
