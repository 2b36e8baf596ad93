"""What one attention layer reads and writes between its projections, operation by operation, on the CPU.

The products of its linear modules are left out. What runs on a GPU alone (cuDNN's pieces, kernels of Triton and Liger)
is stood in for by what it reads and writes, and computes nothing: values are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from configs.schema import AdapterConfig, Config, ModelConfig
from prefix_train import attention, fused, heads, joined, machine, model, pieces, unit
from prefix_train.layout import Layout
from tests import machines, models
from tests.live_bytes import LiveBytes
from tests.passes import NOTHING, elements, where

GEOMETRY = {"hidden_size": 80, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16}
"""In the proportions of 27B: 24 query heads for 4 of keys, 6,144 for a hidden state of 5,120."""

ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
          "mrope_interleaved": True}  # fmt: skip

STAR = [64, *[10] * 8], [-1, *[0] * 8]
"""In the proportions of 64,000 tokens that 80 times 1,000 follow."""

PRODUCTS = ("products", "frozen", "tiles", "together", "dropout", "counted", "precision", "copies")
"""Files whose operations are those of linear modules."""


class Pass(NamedTuple):
    """One operation. phase: forward, recomputation or backward. where: the function that asked for it, or the node of
    autograd. size: what it reads and writes, in tensors of all queries."""

    phase: str
    name: str
    where: str
    size: float


class Passes(TorchDispatchMode):
    """Within this context `found` lists the passes. one: elements of a tensor of all queries; smaller ones than a
    tenth of it do not count, nor does what `module` holds."""

    def __init__(self, module: nn.Module, one: int) -> None:
        super().__init__()
        self._held = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
        self._one, self._backward = one, False
        self.found: list[Pass] = []

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._backward = True
        yield
        self._backward = False

    def kernel(self, name: str, *touched: Tensor) -> None:
        """One that is stood in for: it reads or writes each of these once."""
        self._add(name, touched, name)

    def _add(self, name: str, touched: Sequence[Any], where: str) -> None:
        sizes = [elements(x) for x in touched if isinstance(x, Tensor) and not self._is_held(x)]
        if total := sum(size for size in sizes if size * 10 >= self._one):
            again = "recomputation" if unit.recomputing() else "backward"
            self.found.append(Pass(again if self._backward else "forward", name, where, total / self._one))

    def _is_held(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in NOTHING or name.endswith("view"):
            return found
        place = where()
        if place.split(".")[0] not in PRODUCTS:
            blind = args[1:] if name in ("copy_", "zero_", "fill_") else args  # written to without being read
            more = args[:1] if name in ("slice_backward", "select_backward") else ()  # into what was filled with zeros
            self._add(name, tree_leaves((blind, kwargs, found, more)), place)
        return found


def of_attention(how: str, grouped: bool, monkeypatch: pytest.MonkeyPatch, live: LiveBytes | None = None) -> list[Pass]:
    """Of one attention layer of a tiny hybrid as prepared for training, recomputed, on stand-ins for a GPU's kernels.

    how: `model.heads`. grouped: do pieces take fewer heads of keys than of queries? live: is told what is alive.
    """
    base = models.build("qwen3_5_text", **GEOMETRY, rope_parameters=ROTARY)
    layout = Layout.from_tree(*STAR)
    config = Config(
        model=ModelConfig(heads=how),  # type: ignore[arg-type]
        adapter=AdapterConfig(rank=2, dropout=0.0, targets=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    monkeypatch.setattr(machine, "settle", machines.with_heads)
    prepared = model.prepare(base, config)
    root = model.Root(prepared, torch.float32, chunk_rows=64, images=False)
    layer = next(one for one in root.anatomy.layers if hasattr(one, "self_attn"))
    mixer: Any = layer.self_attn
    passes = Passes(prepared, layout.total * mixer.q_proj.out_features // 2)
    _stand_in(passes, grouped, monkeypatch)
    tables = root.anatomy.decoder.rotary_emb(torch.zeros(1, 1, 1), layout.position_ids())
    hidden, grad = torch.randn(2, 1, layout.total, GEOMETRY["hidden_size"])
    given = {"position_embeddings": tables, "attention_mask": None, "layout": layout}
    assert root.copies is not None
    with root.copies, unit._forward_of(layer).copies, passes, live or nullcontext():
        out, _ = checkpoint(mixer, hidden.requires_grad_(), use_reentrant=False, context_fn=unit._contexts, **given)
        with passes.backward():
            out.backward(grad)
    return passes.found


def _stand_in(passes: Passes, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "resolve_kernels", lambda *_: "joined")
    monkeypatch.setattr(attention, "pieces_for", lambda _: Pieces(passes, grouped))
    monkeypatch.setattr(heads, "require", lambda _: None)
    monkeypatch.setattr(fused, "runs", lambda *_: True)
    monkeypatch.setattr(fused, "_liger", lambda *_: LigerNorm)
    monkeypatch.setattr(LigerNorm, "passes", passes, raising=False)

    def join(parts: Sequence[Tensor], lses: Sequence[Tensor], layout: Any) -> tuple[Tensor, Tensor]:
        count, size = parts[0].shape[1], parts[0].shape[3]
        out = parts[0].new_empty(1, layout.total, count, size)
        passes.kernel("join", *parts, out)
        return out, out.new_empty(1, count, layout.total)

    def add(parts: Sequence[Tensor], layout: Any, like: Tensor) -> Tensor:
        passes.kernel("add", *parts, out := torch.empty_like(like))
        return out

    def add_heads(total: Tensor, part: Tensor, start: Any, rows: Any, more: bool) -> None:
        passes.kernel("add_heads", part)  # what it adds to is a few heads

    def rotate(x: Tensor, *_: Any) -> Tensor:
        passes.kernel("rotate", x, out := x.new_empty(x.shape))
        return out

    def rotate_back(grad: Tensor, x: Tensor, norm: Any, cos: Tensor, sin: Tensor, into: Tensor, learned: bool) -> None:
        passes.kernel("rotate_back", grad, x, into)

    def gate(x: Tensor, gate: Tensor) -> Tensor:
        passes.kernel("gate", x, gate, out := x.new_empty(len(x), x[0].numel()))
        return out

    def gate_back(grad: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        passes.kernel("gate_back", grad, x, gate, gate, out := x.new_empty(x.shape))
        return out

    made = {one.__name__: one for one in (rotate, rotate_back, gate, gate_back)}
    for one in (join, add, add_heads):
        monkeypatch.setattr(joined, one.__name__, one)
    monkeypatch.setattr(heads, "_kernels", made.__getitem__)


class Pieces:
    """As cuDNN's: outputs and gradients lie as queries do."""

    def __init__(self, passes: Passes, grouped: bool) -> None:
        self.passes, self.grouped = passes, grouped

    def _ready(self, inputs: pieces.Triple) -> pieces.Triple:
        return inputs if self.grouped else pieces._one_head_each(inputs)

    def forward(self, inputs: pieces.Triple, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        inputs = self._ready(inputs)
        out = torch.empty_like(inputs[0])
        self.passes.kernel("piece", *inputs, out)
        return out, out.new_empty(out.shape[:3])

    def backward(self, grad: Tensor, inputs: pieces.Triple, out: Tensor, lse: Tensor, *_: Any) -> pieces.Triple:
        inputs = self._ready(inputs)
        found = [torch.empty_like(x) for x in inputs]
        self.passes.kernel("piece_back", grad, *inputs, out, *found)
        return found[0], found[1], found[2]


class LigerNorm(Function):
    """As Liger's: both ways it makes rows lie one behind the other."""

    passes: Passes

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        LigerNorm.passes.kernel("norm", x, out := torch.empty_like(x))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        LigerNorm.passes.kernel("norm_back", grad, x, out := torch.empty_like(x))
        return out, None, None, None, None, None


def table(found: Sequence[Pass]) -> str:
    """By phase, operation and place: how often, and how much in all."""
    lines: dict[tuple[str, str, str], list[float]] = {}
    for one in found:
        lines.setdefault(one[:3], []).append(one.size)
    rows = [f"{sum(sizes):7.2f} {len(sizes):3} x  {'  '.join(key)}" for key, sizes in lines.items()]
    return "\n".join(rows)
