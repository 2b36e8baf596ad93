"""What a layer reads and writes between its kernels, counted in tensors of hidden states: forward, recomputation and
backward of one Gated DeltaNet layer and of one with attention, adapters as configs/geometries/qwen3.6-27b.yaml has
them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from prefix_train import dropout, fused, norms, together
from tests import passes
from tests.passes import Pass

KINDS = ["linear_attn", "self_attn"]
PREFIX_OF_THREE = (0, 2, 4)
"""Examples of one prefix: two groups of segments, in the order in which they are computed."""

ADDITION = 3000
"""Two tensors are read, one is written."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "BLOCK", 4)


def of_projections(found: list[Pass]) -> list[int]:
    """Sums of what the projections' backward gives: autograd adds them after the node that gave the last."""
    nodes = ("_TogetherBackward", "_AdaptedBackward", "ViewBackward0", "UnsafeViewBackward0")
    whole = [one for one in found if one.kind == "additions" and one.nbytes == ADDITION and one.phase == "backward"]
    return [one.nbytes for one in whole if one.where in nodes]


@pytest.mark.parametrize("kind", KINDS)
def test_projections_gradients_are_not_summed_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_projections(passes.of_layer("qwen3_5_text", kind)) == []
    monkeypatch.setattr(together, "install", lambda *_: None)
    assert (
        of_projections(passes.of_layer("qwen3_5_text", kind)) == [ADDITION] * {"linear_attn": 3, "self_attn": 2}[kind]
    )


def of_residual(found: list[Pass]) -> dict[str, int]:
    """Sums of hidden states, and of the gradients of a norm and of what is beside it, by phase."""
    places = ("modeling_qwen3_5.Qwen3_5DecoderLayer.forward", "residual.Layer.__call__", "_TilesBackward")
    some = [one for one in found if one.kind == "additions" and one.where in places and one.nbytes == ADDITION]
    return {phase: sum(one.phase == phase for one in some) for phase in ("forward", "recomputation", "backward")}


def rows(
    hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`norms_triton.rows` by torch's operations."""
    assert centred
    total = hidden if added is None else hidden + added
    scales = torch.rsqrt(total.square().mean(-1) + eps)
    return total, total * scales[..., None] * (1 + weight), scales


def rows_backward(
    of_total: Tensor, of_normed: Tensor, total: Tensor, weight: Tensor, scales: Tensor, centred: bool, learns: bool
) -> tuple[Tensor, None]:
    """`norms_triton.rows_backward` by torch's operations."""
    assert centred
    assert not learns
    shape, through = total * scales[..., None], of_normed * (1 + weight)
    through = scales[..., None] * (through - shape * (through * shape).mean(-1, keepdim=True))
    return through.add_(of_total), None


def gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`norms_triton.gated` by torch's operations."""
    x = x.view(gate.shape)
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * torch.nn.functional.silu(gate))


def gated_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, of_gate: Tensor, learns: bool
) -> tuple[Tensor, None]:
    """In place of `norms_triton.gated_backward`: its values are not looked at here."""
    of_gate.copy_(grad)
    return grad.clone().view(x.shape), None


def with_one_kernel(patch: pytest.MonkeyPatch) -> None:
    """As with model.elementwise=fused."""
    kernels = SimpleNamespace(rows=rows, rows_backward=rows_backward, gated=gated, gated_backward=gated_backward)
    patch.setattr(fused, "one_kernel", lambda *_: True)
    patch.setattr(norms, "_kernels", lambda: kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_residual_sums_are_not_passes_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With model.elementwise=fused but one is left: the last of a layer, whose norm is the next one's."""
    assert of_residual(passes.of_layer("qwen3_5_text", kind)) == {"forward": 2, "recomputation": 1, "backward": 2}
    with_one_kernel(monkeypatch)
    assert of_residual(passes.of_layer("qwen3_5_text", kind)) == {"forward": 1, "recomputation": 0, "backward": 0}


def test_heads_of_several_groups_are_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def together_made() -> list[str]:
        found = passes.of_layer("qwen3_5_text", "linear_attn", PREFIX_OF_THREE)
        places = ("fused.gated_norm", "deltanet._whole")
        return [one.phase for one in found if one.kind == "concatenations" and one.where in places]

    assert together_made() == ["forward", "recomputation"]
    with_one_kernel(monkeypatch)
    assert together_made() == []
