"""Counts the bytes that a block's way down takes on a GPU, at real sizes and without one: on the meta device.

Everything is the product's own code; only kernels that need a GPU are stood in for, by functions that allocate what
these do. Workspaces, which a kernel takes and gives back within one operation, are added by formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from configs.schema import Config
from prefix_train import anatomy, attention, fused, heads, joined, machine, model, norms, patch, unit
from prefix_train.layout import Layout
from prefix_train.offload import Inputs
from prefix_train.pieces import CudaPieces
from prefix_train.stream import walk
from tests import machines
from tests.live_bytes import LiveBytes

aten = torch.ops.aten


def cudnn_workspace(query: Tensor) -> int:
    """Of cuDNN's backward: the query's gradient in float32 and two statistics of each row; 260 and 130 MiB where 64
    heads of 128 had 8,192 and 4,096 rows (an H200's allocator said so)."""
    batch, heads, rows, size = query.shape
    return batch * heads * rows * (size + 2) * 4


WORKSPACES: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_cudnn_attention_backward.default: lambda grad, query, *rest: cudnn_workspace(query),
    aten._scaled_dot_product_flash_attention_backward.default: lambda grad, query, *rest: cudnn_workspace(query),
}
"""Bytes of an operation with these arguments."""


class DeviceBytes(LiveBytes):
    """As LiveBytes, of the meta device's tensors, workspaces included."""

    def __init__(self) -> None:
        super().__init__()
        self.up = 0

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that are there and do not count."""
        for one in tensors:
            storage = one.untyped_storage()
            self._alive[storage._cdata] = (StorageWeakRef(storage), 0, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.is_meta:
                storage = one.untyped_storage()
                key, what = storage._cdata, (tuple(one.shape), one.dtype, str(func))
                if key not in self._alive or self._alive[key][0].expired():
                    self._alive[key] = (StorageWeakRef(storage), storage.nbytes(), what)
        workspace = WORKSPACES[func](*args) if func in WORKSPACES else 0
        now = self.now + workspace
        if now > self.peak:
            self.peak = now
            alive = [(nbytes, *what) for _, nbytes, what in self._alive.values() if nbytes]
            alive.append((workspace, (), torch.uint8, f"workspace of {func}"))
            self.largest = sorted(alive, key=lambda one: -one[0])
        return found


class Norm(Function):
    """What Liger's allocates: output, a statistic of each row; the input's gradient, and few rows of the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        of_weight = weight.new_empty(132, len(weight), dtype=torch.float32).sum(0).to(weight.dtype)
        return torch.empty_like(grad), of_weight, None, None, None, None


def liger(module: str, function: str) -> Callable[..., Any]:
    """In place of Liger's kernels."""
    return {
        "LigerRMSNormFunction": Norm,
        "swiglu_forward": lambda gate, up: (gate, up, torch.empty_like(gate)),
        "swiglu_backward": lambda gate, up, grad: (gate, up),
    }[function]


def rotate(x: Tensor, *_: Any) -> Tensor:
    """In place of `heads_triton`'s."""
    count, heads, size = x.shape
    return x.new_empty(heads, count, size).transpose(0, 1)


HEADS: dict[str, Callable[..., Any]] = {
    "rotate": rotate,
    "rotate_back": lambda *_: None,
    "gate": lambda x, gate: x.new_empty(len(x), x.shape[1] * x.shape[2]),
    "gate_back": lambda grad, x, gate: x.new_empty(x.shape),
}
"""Of `heads`, weights of norms frozen."""


class Norms:
    """Of `norms`, weights frozen."""

    @staticmethod
    def rows(hidden: Tensor, added: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Total, normed and a scale for each row."""
        scales = hidden.new_empty(hidden.numel() // hidden.shape[-1], dtype=torch.float32)
        return hidden if added is None else torch.empty_like(hidden), torch.empty_like(hidden), scales

    @staticmethod
    def rows_backward(of_total: Tensor, of_normed: Tensor, total: Tensor, *_: Any) -> tuple[Tensor, None]:
        """Gradient of what was summed."""
        return torch.empty_like(total), None


def join(parts: Sequence[Tensor], lses: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """In place of `joined`'s."""
    heads, size = parts[0].shape[1], parts[0].shape[3]
    out = parts[0].new_empty(1, layout.total, heads, size)
    return out, torch.empty(1, heads, layout.total, dtype=torch.float32, device=out.device)


def nothing(*_: Any, **__: Any) -> None:
    """What writes into what is there."""


@contextmanager
def kernels(cudnn: bool = True, fuses: bool = True) -> Iterator[None]:
    """A GPU's kernels on the meta device. cudnn: its attention, else FlashAttention's. fuses: is Liger there?"""

    def pieces_for(query: Tensor) -> CudaPieces:
        return CudaPieces(cudnn)

    def runs(inputs: Tensor, elementwise: str) -> bool:
        return fuses

    # Functions, for a mock would keep the tensors that it is called with.
    with (
        mock.patch.object(machine, "of", return_value=machines.H200),
        mock.patch.object(attention, "pieces_for", pieces_for),
        mock.patch.object(fused, "runs", runs),
        mock.patch.object(fused, "_liger", liger),
        mock.patch.object(heads, "_kernels", HEADS.__getitem__),
        mock.patch.object(norms, "_kernels", return_value=Norms),
        mock.patch.object(joined, "join", join),
        mock.patch.object(joined, "add", lambda parts, layout, like: torch.empty_like(like)),
        mock.patch.object(joined, "add_heads", nothing),
    ):
        yield


def count(config: Config, lengths: Sequence[int], parents: Sequence[int]) -> DeviceBytes:
    """The second block's way up (`up`: its peak) and down (`peak`), the first one's input being there too."""
    device = torch.device("meta")
    prepared = model.prepare(model.skeleton(config.model), config)
    found, dtype = anatomy.find(prepared), model.DTYPES[config.model.dtype]
    unit.compute_in(found, dtype)
    handle = patch.handle_of(found.decoder)
    layout = Layout.from_tree(lengths, parents).to(device)
    width = found.base.get_input_embeddings().embedding_dim
    root: Any = SimpleNamespace(anatomy=found, lowest=0, handle=handle, graphs=None)
    going = walk.Walk(root, [], learning=True)
    positions = found.decoder.rotary_emb(
        torch.empty(1, layout.total, width, dtype=dtype, device=device),
        torch.empty(1, layout.total, dtype=torch.int64, device=device),
    )
    call: Any = ((), {"position_embeddings": positions, "layout": layout, "attention_mask": None})
    live = DeviceBytes()
    live.leave_out([*prepared.parameters(), *prepared.buffers()])
    with live:
        hidden = torch.empty(1, layout.total, width, dtype=dtype, device=device)
        inputs = Inputs(None)
        inputs.push(hidden)
        passage = walk.Passage(SimpleNamespace(layout=layout), None, [call, call], hidden.clone(), inputs)  # type: ignore[arg-type]
        del hidden
        memory = torch.empty(0)
        with torch.no_grad():
            going._rise(passage, 1, found.layers[1], memory)
        passage.grad, passage.hidden = passage.hidden, None  # type: ignore[assignment]
        live.up = live.peak
        live.peak = 0
        going._fall(passage, 1, memory)
    return live
