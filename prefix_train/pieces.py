"""Dense pieces of attention: the vendors' kernels that the merged tree attention is put together from.

A piece is dense attention, query [B, Hq, L, D] on key and value [B, Hk, C, D] with Hq a multiple of Hk, either unmasked
or causal with L = C. Its log-sum-exp [B, Hq, L] is that of the scaled scores. Backward may be given output and
log-sum-exp of a larger softmax that the piece is a part of: it then returns the piece's exact share of the gradients.
L and C are at least 1: on empty pieces torch's kernels crash or return infinities.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from configs.errors import UserError

GROUPED = False
"""Does cuDNN get fewer heads of keys than of queries as they are? It takes them, with the same results in the same time
(16,000 rows); until the whole pack has been measured, each query head gets a copy of its keys and values."""

aten = torch.ops.aten
Triple = tuple[Tensor, Tensor, Tensor]


class Pieces(Protocol):
    """One family of kernels."""

    def forward(self, inputs: Triple, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Output [B, Hq, L, D] and log-sum-exp of a piece; inputs: query, key, value."""

    def backward(self, grad: Tensor, inputs: Triple, out: Tensor, lse: Tensor, scale: float, causal: bool) -> Triple:
        """Gradients of query, key and value; the last two with Hk heads, or with Hq, for each query head its share."""


class CpuPieces:
    """torch's flash attention for the CPU: bf16 to float64; it takes grouped heads as they are."""

    def forward(self, inputs: Triple, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """See Pieces."""
        out: Tensor
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
        return out, lse

    def backward(self, grad: Tensor, inputs: Triple, out: Tensor, lse: Tensor, scale: float, causal: bool) -> Triple:
        """See Pieces."""
        grads: Triple = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *inputs, out, lse, 0.0, causal, scale=scale
        )
        return grads


class CudaPieces:
    """torch's cuDNN attention, or its FlashAttention-2 where cuDNN's is slower or not supported.

    grouped: cuDNN gets keys and values as they are; else, as FlashAttention-2, once for each query head.
    """

    def __init__(self, cudnn: bool, grouped: bool = False) -> None:
        self.cudnn, self.grouped = cudnn, grouped

    def forward(self, inputs: Triple, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """See Pieces."""
        query, key, value = self._ready(inputs)
        out: Tensor
        if self._suits_cudnn(query, key):
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, causal, False, scale=scale
            )
        else:
            out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse.view(query.shape[:3])

    def backward(self, grad: Tensor, inputs: Triple, out: Tensor, lse: Tensor, scale: float, causal: bool) -> Triple:
        """See Pieces."""
        query, key, value = self._ready(inputs)
        lengths = (query.shape[2], key.shape[2])
        grads: Triple
        if self._suits_cudnn(query, key):
            # Seed and offset are of dropout, which is off; there is no bias and no ragged batch.
            seed = torch.zeros((), dtype=torch.int64, device=query.device)
            column = lse.contiguous()[..., None]
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                grad, query, key, value, out, column, seed, seed, None, None, None, *lengths, 0.0, causal, scale=scale
            )
        else:
            seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
            grads = aten._scaled_dot_product_flash_attention_backward(
                grad,
                query,
                key,
                value,
                out,
                lse.contiguous(),
                None,
                None,
                *lengths,
                0.0,
                causal,
                seed,
                seed,
                scale=scale,
            )
        return grads

    def _ready(self, inputs: Triple) -> Triple:
        return inputs if self.grouped and self._suits_cudnn(*inputs[:2]) else _one_head_each(inputs)

    def _suits_cudnn(self, query: Tensor, key: Tensor) -> bool:
        # cuDNN refuses a single key, and short pieces are no faster with it.
        return self.cudnn and min(query.shape[2], key.shape[2]) >= 64


def pieces_for(query: Tensor) -> Pieces:
    """Kernels for the device, dtype and head size of `query`; UserError where there are none."""
    if query.device.type == "cpu":
        return CpuPieces()
    if query.device.type != "cuda":
        raise UserError(f"attention kernels 'merged' run on CPU and CUDA, not on {query.device.type}")
    size = query.shape[3]
    if query.dtype not in (torch.bfloat16, torch.float16) or size % 8 or size > 256:
        raise UserError(
            f"attention kernels 'merged' on CUDA take bfloat16 with heads of 8, 16, ... 256, not {query.dtype} with "
            f"heads of {size}: set model.attention=flex or model.attention=dense"
        )
    hopper = torch.cuda.get_device_capability(query.device) == (9, 0)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    # Heads between 128 and 256 have no backward; 256 itself came with 9.10, on Hopper.
    suits = hopper and (cudnn or 0) >= 91000 and (size <= 128 or size == 256)
    return CudaPieces(cudnn=suits, grouped=GROUPED)


def _one_head_each(inputs: Triple) -> Triple:
    query, key, value = inputs
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return inputs
    return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def sum_heads(grad: Tensor, heads: int) -> Tensor:
    """[B, Hq, C, D] -> [B, heads, C, D], summed in float32."""
    return (
        grad
        if grad.shape[1] == heads
        else grad.view(grad.shape[0], heads, -1, *grad.shape[2:]).sum(2, dtype=torch.float32)
    )
