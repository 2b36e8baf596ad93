"""What goes into flash-linear-attention's kernels and comes out of them, with stand-ins that compute on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train import flash_linear
from prefix_train.deltanet import tree_conv, tree_delta_rule
from prefix_train.layout import CHUNK, Layout
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

    return {"causal_conv1d": causal_conv1d, "chunk_gated_delta_rule": chunk_gated_delta_rule}[name]


@pytest.mark.parametrize("most", [2, 128])
def test_calls_of_flash_linear_attention(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(flash_linear, "_import", stand_in)
    layout = Layout.from_tree(*trees.FIVE_DEEP, group=most)
    of = rule_inputs(layout, torch.float32)
    grad = draws(2, (1, layout.total, VALUE_HEADS, VALUE))[0]
    found = with_gradients(tree_delta_rule(*of, layout, kernels="fla"), of, grad)
    trees.assert_close(found, rule_truth(layout, of, grad), 5e-6, RULE_NAMES)
    conv = conv_inputs(layout, torch.float32)
    grad = draws(1, (layout.total, CHANNELS))[0]
    found = with_gradients(tree_conv(*conv, layout, kernels="fla"), conv, grad)
    trees.assert_close(found, conv_truth(layout, conv, grad), 5e-6, CONV_NAMES)


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
