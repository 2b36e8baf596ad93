"""Attention over a forest of segments: a token sees itself and what is before it on its own root path.

`dense` is the reference. `merged` puts the same softmax together from dense pieces: each segment's own causal part, and
for each node one unmasked rectangle in which all its descendants, contiguous in depth-first order, read the node in
full. Pieces are joined by their log-sum-exp; `joined` does that to the same pieces in one pass. `flex` is
FlexAttention with a block mask made from the segment table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from prefix_train import joined, kernel_choice, machine, shelf
from prefix_train.flex import flex_attention
from prefix_train.layer_bytes import head_groups
from prefix_train.layout import Block, Layout, Rectangle
from prefix_train.pieces import Triple, pieces_for, sum_heads


def resolve_kernels(kernels: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, head_size: int = 0) -> str:
    """What `kernels`, `auto` or by name, means on `device` for inputs in `dtype`: see `kernel_choice.attention`.

    head_size: 0, where it is not known. UserError for what cannot run.
    """
    return kernel_choice.attention(kernels, machine.model(dtype, head_size), machine.of(device))


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, kernels: str = "merged"
) -> Tensor:
    """Softmax attention where each token sees its root path up to itself.

    query: [1, Hq, T, D]. key, value: [1, Hk, T, D], Hq a multiple of Hk. scale: factor of the scores. kernels: see the
    module. Softmax and sums in at least float32; returns [1, T, Hq, D] in the dtype of the query.
    Raises ValueError where the layout was built for another length or the kernels are unknown.
    """
    if (query.shape[0], query.shape[2]) != (1, layout.total):
        raise ValueError(f"the layout has {layout.total} positions, but attention got {tuple(query.shape)}")
    if kernels == "dense":
        return _dense(query, key, value, layout, scale)
    if kernels == "flex":
        return flex_attention(query, key, value, layout, scale)
    if kernels not in ("merged", "joined"):
        raise ValueError(f"attention kernels {kernels!r} are unknown: {', '.join(kernel_choice.ATTENTION)}")
    out: Tensor = _Merged.apply(query, key, value, layout, scale, kernels == "joined")  # type: ignore[no-untyped-call]
    return out


def _dense(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.to(wide).repeat_interleave(groups, 1) for x in (key, value))
    scores = (query.to(wide) @ key.mT) * scale
    weights = scores.masked_fill(~layout.visible(), float("-inf")).softmax(-1)
    return (weights @ value).to(query.dtype).transpose(1, 2)


class _Merged(Function):
    """Dense pieces joined by log-sum-exp.

    A layer that keeps them computes output and log-sum-exp once, not once more in its recomputation.
    Backward gives every piece the merged output and log-sum-exp: exp(score - lse) is then the true probability, and the
    pieces' shares add up to the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, in_one_pass: bool
    ) -> Tensor:
        kept = shelf.current()
        found = None if kept is None else kept.take()
        if found is None:
            out, lse = (_joined if in_one_pass else _merged)(query, key, value, layout, scale)
            if kept is not None:
                kept.put(out, lse)
        else:
            out, lse = found
        out = out.transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale, ctx.in_one_pass = layout, scale, in_one_pass
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        shares = _Shares(grad.transpose(1, 2), ctx.saved_tensors, ctx.layout, ctx.scale)
        gradients = shares.joined() if ctx.in_one_pass else shares.merged()
        return *gradients, None, None, None


class _Shares:
    """The gradients that each piece gives. grad: [1, H, T, D]. saved: query, key, value, merged output and lse."""

    def __init__(self, grad: Tensor, saved: tuple[Tensor, ...], layout: Layout, scale: float) -> None:
        self.grad, self.layout, self.scale = grad, layout, scale
        self.query, self.key, self.value, self.out, self.lse = saved
        self.pieces = pieces_for(self.query)

    def of_block(self, block: Block) -> Triple:
        """Each segment's own causal part."""
        inputs = _take_all(block, self.query, self.key, self.value)
        return self.pieces.backward(
            _take(block, self.grad), inputs, _take(block, self.out), _take(block, self.lse), self.scale, True
        )

    def of_rectangle(self, node: Rectangle) -> Triple:
        """Descendants' reading of a node."""
        rows, inputs = slice(node.row_start, node.row_end), _rectangle(node, self.query, self.key, self.value)
        return self.pieces.backward(
            self.grad[:, :, rows], inputs, self.out[:, :, rows], self.lse[:, :, rows], self.scale, False
        )

    def merged(self) -> Triple:
        """Some heads after the others, where all at once would take too much memory."""
        inputs = (self.query, self.key, self.value)
        groups = _groups(self.query, self.key, self.layout)
        if groups == 1:
            return self.added()
        of_query, of_key, of_value = map(torch.empty_like, inputs)
        tensors = (self.grad, *inputs, self.out, self.lse)
        for parts in zip(*(x.chunk(groups, 1) for x in (*tensors, of_query, of_key, of_value)), strict=True):
            grad, *saved = parts[: len(tensors)]
            found = _Shares(grad, tuple(saved), self.layout, self.scale).added()
            for total, share in zip(parts[len(tensors) :], found, strict=True):
                total.copy_(share)
            del found, share
        return of_query, of_key, of_value

    def added(self) -> Triple:
        """Of a single piece as they are; else added up in the wider dtype, one after the other."""
        heads, inputs = self.key.shape[1], (self.query, self.key, self.value)
        if _single(self.layout):
            query, key, value = self.of_block(self.layout.blocks[0])
            return query, sum_heads(key, heads).to(self.key.dtype), sum_heads(value, heads).to(self.value.dtype)
        sums = [torch.empty_like(x, dtype=self.lse.dtype) for x in inputs]
        for block in self.layout.blocks:
            found = self.of_block(block)
            for total, share in zip(sums, found, strict=True):
                _put(block, total, sum_heads(share, total.shape[1]))
            del found, share  # before the next piece takes as much
        for node in self.layout.rectangles:
            found = self.of_rectangle(node)
            rows, cols = slice(node.row_start, node.row_end), slice(node.col_start, node.col_end)
            for total, share, where in zip(sums, found, (rows, cols, cols), strict=True):
                total[:, :, where] += sum_heads(share, total.shape[1])
            del found, share
        of_query, of_key, of_value = (total.to(x.dtype) for total, x in zip(sums, inputs, strict=True))
        return of_query, of_key, of_value

    def joined(self) -> Triple:
        """The query's in one pass in the end; those of keys and values, a few heads, as they come."""
        of_query, sums = [], [torch.empty_like(x, dtype=torch.float32) for x in (self.key, self.value)]
        for block in self.layout.blocks:
            query, *others = self.of_block(block)
            of_query.append(query)
            rows = None if block.start is not None else block.rows
            for total, share in zip(sums, others, strict=True):
                joined.add_heads(total, share, block.start, rows, more=False)
            del others, share  # before the next piece takes as much
        for node in self.layout.rectangles:
            query, *others = self.of_rectangle(node)
            of_query.append(query)
            for total, share in zip(sums, others, strict=True):
                joined.add_heads(total, share, node.col_start, None, more=True)
            del others, share
        whole = of_query[0] if _single(self.layout) else joined.add(of_query, self.layout, self.query)
        return whole, sums[0].to(self.key.dtype), sums[1].to(self.value.dtype)


def _joined(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """As `_merged`, with no more written than the pieces and what they come to."""
    joined.require(query)
    pieces = pieces_for(query)
    found = [pieces.forward(_take_all(block, query, key, value), scale, True) for block in layout.blocks]
    found += [pieces.forward(_rectangle(node, query, key, value), scale, False) for node in layout.rectangles]
    if _single(layout):
        ((out, lse),) = found
        return out.transpose(1, 2).contiguous(), lse
    return joined.join([out for out, _ in found], [lse for _, lse in found], layout)


def _single(layout: Layout) -> bool:
    """Is there one piece alone?"""
    return len(layout.lengths) == 1


def _merged(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, T, H, D], contiguous, and log-sum-exp [1, H, T]; see `_Shares.merged`."""
    groups = _groups(query, key, layout)
    if groups == 1:
        return _pieces_merged(query, key, value, layout, scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
    tensors = (x.chunk(groups, 1) for x in (query, key, value, out.transpose(1, 2), lse))
    for of_query, of_key, of_value, into, lse_into in zip(*tensors, strict=True):
        found, lse_found = _pieces_merged(of_query, of_key, of_value, layout, scale)
        into.copy_(found.transpose(1, 2))
        lse_into.copy_(lse_found)
        del found
    return out, lse


def _pieces_merged(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    pieces = pieces_for(query)
    if _single(layout):
        out, lse = pieces.forward((query, key, value), scale, True)
        return out.transpose(1, 2).contiguous(), lse
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format).transpose(1, 2)
    lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
    for block in layout.blocks:
        part, part_lse = pieces.forward(_take_all(block, query, key, value), scale, True)
        _put(block, out, part)
        _put(block, lse, part_lse)
        del part  # before the next piece takes as much
    for node in layout.rectangles:
        part, part_lse = pieces.forward(_rectangle(node, query, key, value), scale, False)
        rows = slice(node.row_start, node.row_end)
        _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        del part
    return out.to(query.dtype).transpose(1, 2), lse


def _groups(query: Tensor, key: Tensor, layout: Layout) -> int:
    """In how many groups of heads, some after the others."""
    heads, most = (query.shape[1], key.shape[1]), largest_piece(layout)
    return head_groups(heads, query.shape[3], layout.total, most, _single(layout), query.element_size())


def largest_piece(layout: Layout) -> int:
    """As `Shape.piece`."""
    of_blocks = [7 * block.count * block.length for block in layout.blocks]
    of_rectangles = [3 * (one.row_end - one.row_start) + 4 * (one.col_end - one.col_start) for one in layout.rectangles]
    return max(of_blocks + of_rectangles)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join a piece [1, H, n, D] and its log-sum-exp [1, H, n] into `out` and `lse`."""
    merged = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_((lse - merged).exp_()[..., None]).addcmul_(part, (part_lse - merged).exp_()[..., None])
    lse.copy_(merged)


def _rectangle(node: Rectangle, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cols = slice(node.col_start, node.col_end)
    return query[:, :, node.row_start : node.row_end], key[:, :, cols], value[:, :, cols]


def _take_all(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _take(block, query), _take(block, key), _take(block, value)


def _take(block: Block, x: Tensor) -> Tensor:
    """[1, H, T, ...] -> [count, H, length, ...], a view where the block is contiguous."""
    if block.start is None:
        tokens = x.index_select(2, block.rows)
    else:
        tokens = x[:, :, block.start : block.start + block.count * block.length]
    return tokens[0].view(x.shape[1], block.count, block.length, *x.shape[3:]).transpose(0, 1)


def _put(block: Block, target: Tensor, part: Tensor) -> None:
    """Write [count, H, length, ...] to the block's tokens of `target` [1, H, T, ...]."""
    tokens = part.transpose(0, 1).flatten(1, 2)
    if block.start is None:
        target[0].index_copy_(1, block.rows, tokens.to(target.dtype))
    else:
        target[0, :, block.start : block.start + block.count * block.length] = tokens
