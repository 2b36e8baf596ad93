"""Counts a layer's passes over memory: operations of torch that read or write tensors of rows, on the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.schema import AdapterConfig, Config, MemoryConfig
from prefix_train import anatomy, model, unit
from tests import batches, models

KINDS = {
    "additions": ("add", "add_"),
    "concatenations": ("cat", "stack"),
    "copies": ("clone", "copy_", "_to_copy", "contiguous"),
    "fills": ("zeros", "zeros_like", "new_zeros", "zero_", "fill_", "full", "full_like", "new_full"),
    "sums": ("sum",),
    "products by element": ("mul", "mul_", "addcmul_"),
    "products of matrices": ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear"),
}
"""What an operation is, by its name; everything else is `others`."""

NOTHING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh")
"""Operations that touch no memory."""

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
"""What has adapters in configs/geometries/qwen3.6-27b.yaml."""

TILE, HIDDEN = 8, 32

OWN = (str(Path(unit.__file__).parent), "transformers/models")
"""Where frames say what a pass is for."""


class Pass(NamedTuple):
    """One operation. phase: forward, recomputation or backward. where: the function that asked for it, or the node of
    autograd; nbytes: read and written."""

    phase: str
    kind: str
    name: str
    where: str
    nbytes: int


class Passes(TorchDispatchMode):
    """Within this context `found` lists the passes. least: elements of the smallest tensor that counts; tensors that
    belong to `model` never do."""

    def __init__(self, model: nn.Module, least: int) -> None:
        super().__init__()
        held = [*model.parameters(), *model.buffers()]
        self._held = {one.untyped_storage().data_ptr() for one in held}
        self._least = least
        self.phase = "forward"
        self.found: list[Pass] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in NOTHING or name.endswith("view"):
            return found
        nbytes = sum(one.element_size() * elements(one) for one in self._read(func, args, kwargs))
        nbytes += sum(one.element_size() * elements(one) for one in self._counted(tree_leaves(found)))
        if nbytes:
            kind = next((kind for kind, names in KINDS.items() if name in names), "others")
            phase = "recomputation" if self.phase == "backward" and unit.recomputing() else self.phase
            self.found.append(Pass(phase, kind, name, where(), nbytes))
        return found

    def _counted(self, tensors: list[Any]) -> Iterator[Tensor]:
        for one in tensors:
            large = isinstance(one, Tensor) and one.numel() >= self._least
            if large and one.untyped_storage().data_ptr() not in self._held:
                yield one

    def _read(self, func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """Arguments but those that are written to without being read."""
        for place, declared in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(declared.name)
            written = declared.alias_info is not None and declared.alias_info.is_write
            blind = written and (
                declared.name == "out" or func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_")
            )
            if not blind and not (written and kwargs.get("beta") == 0):
                yield from self._counted(tree_leaves(given))


def of_layer(family: str, kind: str, examples: Sequence[int] = range(7)) -> list[Pass]:
    """The passes of one layer that has `kind`, linear_attn or self_attn: forward, recomputation and backward. A hidden
    state has HIDDEN columns; `nbytes` are in tensors of hidden states, in thousandths. examples: of `batches.make`."""
    base = models.build(family)
    packs = batches.batches(batches.make(base, 7), [list(examples)])
    config = Config(adapter=AdapterConfig(rank=2, dropout=0.3, targets=TARGETS), memory=MemoryConfig(tile_rows=TILE))
    prepared = model.prepare(base, config)
    for name, parameter in anatomy.trainable(prepared).items():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.1)
    root = model.Root(prepared, torch.float32, chunk_rows=3, images=False)
    (layer, *_) = (one for one in root.anatomy.layers if hasattr(one, kind))
    given = _arguments(root, layer, packs[0])
    hidden = torch.randn(1, packs[0].positions, HIDDEN).requires_grad_()
    grad = torch.randn(1, packs[0].positions, HIDDEN)
    counted = Passes(prepared, least=TILE * HIDDEN // 2)
    assert root.copies is not None
    with root.copies, counted:
        out = layer(hidden, **given)
        counted.phase = "backward"
        out.backward(grad)
    return [one._replace(nbytes=1000 * one.nbytes // (4 * hidden.numel())) for one in counted.found]


def _arguments(root: model.Root, layer: nn.Module, batch: Any) -> dict[str, Any]:
    """What `layer` is given besides hidden states in a forward of `batch`."""
    noted: dict[str, Any] = {}
    forward = layer.forward

    def note(hidden: Tensor, **given: Any) -> Tensor:
        noted.update(given)
        return forward(hidden, **given)

    layer.forward = note  # type: ignore[method-assign]
    root(batch, draw="0")
    layer.forward = forward  # type: ignore[method-assign]
    return noted


def table(found: list[Pass]) -> str:
    """Tensors of hidden states that are read and written, by phase, kind and place."""
    total: Counter[tuple[str, ...]] = Counter()
    for one in found:
        total[one[:4]] += one.nbytes
    lines = [
        f"{nbytes / 1000:8.2f}  {'  '.join(key)}" for key, nbytes in sorted(total.items(), key=lambda one: -one[1])
    ]
    return "\n".join(lines)


def elements(tensor: Tensor) -> int:
    """How many there are in memory."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def where() -> str:
    """What the operation that called the caller is for: a function of ours or of a model, else the node of autograd."""
    node: Any = torch._C._current_autograd_node()
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        code = frame.f_code
        if any(folder in code.co_filename for folder in OWN):
            return f"{Path(code.co_filename).stem}.{getattr(code, 'co_qualname', code.co_name)}"
        frame = frame.f_back
    return "autograd" if node is None else str(node.name())
