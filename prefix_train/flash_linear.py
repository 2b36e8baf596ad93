"""flash-linear-attention's kernels and causal-conv1d's (CUDA), imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train.groups import Group
from prefix_train.layout import History

CONV = "fla.modules.causal_conv1d"


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Causal depthwise convolution of one sequence. x: [n, C]. weight: [C, W]. Returns [n, C]."""
    causal_conv1d = _import(CONV, "causal_conv1d")
    out: Tensor = causal_conv1d(x=x[None], weight=weight, bias=bias, activation=activation)[0]
    return out[0]


def convolve_segments(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, activation: str | None, history: History
) -> Tensor:
    """Causal depthwise convolution of each segment of [T, C] by itself. states: [S, C, W], the inputs before it, the
    first of them unread. Returns [T, C]; no graph: see `convolve_segments_backward`."""
    forward = _import(CONV, "causal_conv1d_fwd")
    given = _of_segments(x, weight, bias, activation, states, history)
    out: Tensor = forward(residual=None, **given)[0][0]
    return out


def convolve_segments_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    activation: str | None,
    history: History,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of x, weight, bias and states."""
    backward = _import(CONV, "causal_conv1d_bwd")
    given = _of_segments(x, weight, bias, activation, states, history)
    of_x, of_weight, of_bias, _, of_states = backward(dy=grad.contiguous()[None], dht=None, **given)
    return of_x[0], of_weight, of_bias, of_states


def _of_segments(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, states: Tensor, history: History
) -> dict[str, Any]:
    return {
        "x": x[None],
        "weight": weight.contiguous(),
        "bias": bias,
        "initial_state": states,
        "activation": activation,
        "cu_seqlens": history.cu_seqlens,
        "cu_seqlens_cpu": history.cu_seqlens_cpu,
        "chunk_indices": history.chunk_indices,
    }


def convolve_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, history: History) -> Tensor:
    """`convolve` by causal-conv1d, over x: [history.rows, C], where nothing reads across a segment's beginning."""
    causal_conv1d_fn = _import("causal_conv1d", "causal_conv1d_fn")
    of_rows = history.owner.to(torch.int32)[None]
    out: Tensor = causal_conv1d_fn(x.t()[None], weight, bias, seq_idx=of_rows, activation=activation)
    return out[0].t()


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, group: Group
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over the segments of a group, as `deltanet.tree_delta_rule` wants it.

    query, key: [1, n, H, K]. value: [1, n, HV, V]. g, beta: [1, n, HV]. state: [segments, HV, K, V] float32 or None.
    Returns the output [1, n, HV, V] and the final states of `group.keep`, None where there are none.
    The kernels read no index from the device: chunk indices and host-side boundaries come with the group.
    """
    chunk_gated_delta_rule = _import("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    states = (len(group.segments), value.shape[2], key.shape[3], value.shape[3])
    if state is not None:
        _expect_state(state, states, "initial")
    out: Tensor
    final: Tensor | None
    out, final = chunk_gated_delta_rule(
        q=query,
        k=key,
        v=value,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=group.stored > 0,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=group.cu_seqlens,
        cu_seqlens_cpu=group.cu_seqlens_cpu,
        chunk_indices=group.chunk_indices,
    )
    if final is None:
        return out, None
    _expect_state(final, states, "final")
    return out, final.index_select(0, group.keep)


def _expect_state(state: Tensor, shape: tuple[int, ...], which: str) -> None:
    # The kernels take a state of any dtype without a word.
    if state.dtype != torch.float32 or state.shape != shape:
        raise RuntimeError(f"{which} states are {state.dtype} {tuple(state.shape)}, not float32 {shape}")


def _import(module: str, name: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        package = "causal-conv1d" if module == "causal_conv1d" else "flash-linear-attention"
        which, instead = ("fla_cuda", "fla") if package == "causal-conv1d" else ("fla", "reference")
        raise UserError(
            f"deltanet kernels {which!r} need {package}, which cannot be imported here ({error}): "
            f"install it as docs/guides/own-cluster.md says, or set model.deltanet={instead}"
        ) from error
    return function
