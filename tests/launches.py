"""What an update launches on a GPU, counted on a CPU: by part of a visit, by operator, and by who asks for it.

Everything is the product's own code. Kernels that need a GPU are stood in for by what computes the same in plain torch,
each counted as the launches that it makes there. Views and allocations launch nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

import prefix_train
from prefix_train import attention, deltanet, fused, heads, kernel_choice, machine, norms, pieces, unit
from prefix_train.stream import frozen, nf4, walk

aten = torch.ops.aten

NOTHING = frozenset({
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"),
    *("detach", "alias", "_reshape_alias", "_local_scalar_dense", "promote_types"),
})  # fmt: skip
"""Operators that launch nothing, besides views."""

PACKAGE = str(Path(prefix_train.__file__).parent)
REST = "outside of visits"
PARTS: dict[str, tuple[Any, str]] = {
    "up": (walk.Walk, "_rise"),
    "backward": (walk.Walk, "_fall"),
    "once more": (unit, "again"),
}
"""The innermost one counts."""

Key = tuple[str, str, str]
"""Part, operator, and the function of the package that asks for it."""


class Launches(TorchDispatchMode):
    """Counts launches while it is on."""

    now: Launches | None = None

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Key] = Counter()
        self.part, self.within = REST, 0

    def note(self, name: str) -> None:
        """One by whoever asks now."""
        if not self.within:
            self.found[self.part, name, _caller()] += 1

    def total(self, part: str | None = None) -> int:
        """Of one part, or of all parts of visits."""
        return sum(count for (mine, *_), count in self.found.items() if mine == (part or mine) and mine != REST)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(type(one) is frozen.Packed for one in args):
            with self:
                return frozen.Packed.__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NOTHING:
            self.note(name)
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE + '/')}:{frame.f_code.co_qualname}"


@contextmanager
def kernel(*names: str) -> Iterator[None]:
    """What is computed within is these launches."""
    if Launches.now is None:
        yield
        return
    for name in names:
        Launches.now.note(name)
    Launches.now.within += 1
    try:
        yield
    finally:
        Launches.now.within -= 1


def count(run: Callable[[], None]) -> Launches:
    """Of `run`, an update, as a GPU would launch them."""
    launches = Launches()

    def marked(inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, launches.part = launches.part, part
            try:
                return inner(*args, **kwargs)
            finally:
                launches.part = before

        return call

    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            stack.enter_context(mock.patch.object(owner, name, marked(getattr(owner, name), part)))
        stack.enter_context(mock.patch.object(Launches, "now", launches))
        stack.enter_context(launches)
        run()
    return launches


@contextmanager
def kernels() -> Iterator[None]:
    """A GPU's kernels: NF4's, cuDNN's, Liger's, those of `norms` and `heads`, and Gated DeltaNet's, one each way."""
    dequantise, mixer = nf4.dequantise, deltanet

    def nf4_dequantise(parts: nf4.Parts, out: Tensor, chunk: int = nf4.CHUNK) -> Tensor:
        with kernel("nf4_dequantise"):
            return dequantise(parts, out, chunk)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (machine, "of", lambda device: kernel_choice.ASSUMED),
            (nf4, "dequantise", nf4_dequantise),
            (attention, "pieces_for", lambda query: pieces.CudaPieces(cudnn=True)),
            (pieces, "aten", SimpleNamespace(**vars(Cudnn))),
            (fused, "runs", lambda inputs, elementwise: True),
            (fused, "_liger", lambda module, function: LIGER[function]),
            (norms, "_kernels", lambda: Norms),
            (heads, "_kernels", lambda name: getattr(Heads, name)),
            (mixer, "tree_conv_parts", partial(_one_kernel, mixer.tree_conv_parts, "convolution")),
            (mixer, "tree_delta_rule_parts", partial(_one_kernel, mixer.tree_delta_rule_parts, "delta_rule")),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


class Cudnn:
    """cuDNN's attention, by torch's for the CPU."""

    @staticmethod
    def _scaled_dot_product_cudnn_attention(
        query: Tensor, key: Tensor, value: Tensor, *given: Any, scale: float
    ) -> tuple[Tensor, ...]:
        with kernel("cudnn_attention"):
            found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, given[3], scale=scale
            )
            return found

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *given: Any, scale: float
    ) -> tuple[Tensor, ...]:
        with kernel("cudnn_attention_backward"):
            found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse[..., 0], 0.0, given[-1], scale=scale
            )
            return found


class _OneKernel(Function):
    """What `compute` does with tensors, forward as one launch and backward as these."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], forward: str, backward: Sequence[str], *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.compute, ctx.backward_names = compute, backward
        with kernel(forward):
            found = compute(*tensors)
        return tuple(found) if isinstance(found, list) else found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[3:]
        with kernel(*ctx.backward_names), torch.enable_grad():
            leaves = [one.detach().requires_grad_(need) for one, need in zip(ctx.saved_tensors, needed, strict=True)]
            found = ctx.compute(*leaves)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            each = iter(torch.autograd.grad(found, wanted, grads))
        return None, None, None, *(next(each) if need else None for need in needed)


def _one_kernel(compute: Callable[..., Any], name: str, *given: Any, **more: Any) -> Any:
    """`compute`, whose tensors come first, as one launch each way."""
    count = next((place for place, one in enumerate(given) if not isinstance(one, Tensor)), len(given))
    rest = given[count:]
    more = {**more, "kernels": "reference"}
    return _OneKernel.apply(  # type: ignore[no-untyped-call]
        lambda *tensors: compute(*tensors, *rest, **more), name, [f"{name}_backward"], *given[:count]
    )


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    return (weight + offset) * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class _LigerNorm:
    """Liger's, whose backward sums the weight's gradient over its programs, wanted or not."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, offset: float, *_: Any) -> Tensor:
        found: Tensor = _OneKernel.apply(  # type: ignore[no-untyped-call]
            lambda x, weight: _norm(x, weight, eps, offset),
            "liger_norm",
            ["liger_norm_backward", "its weight's sum", "its weight's cast"],
            x.contiguous(),
            weight,
        )
        return found


def _swiglu_forward(gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with kernel("liger_swiglu"):
        return gate, other, F.silu(gate) * other


def _swiglu_backward(gate: Tensor, other: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    with kernel("liger_swiglu_backward"):
        return aten.silu_backward(grad * other, gate), grad * F.silu(gate)


LIGER = {"LigerRMSNormFunction": _LigerNorm, "swiglu_forward": _swiglu_forward, "swiglu_backward": _swiglu_backward}


class Norms:
    """In place of `norms_triton`: what it launches, not what it computes."""

    @staticmethod
    def rows(hidden: Tensor, added: Tensor | None, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        with kernel("norm_rows"):
            total = hidden if added is None else hidden + added
            return total, _norm(total, weight, 1e-6, 0.0), total.new_empty(total.shape[:-1], dtype=torch.float32)

    @staticmethod
    def rows_backward(of_total: Tensor, of_normed: Tensor, *_: Any) -> tuple[Tensor, None]:
        with kernel("norm_rows_backward"):
            return of_total + of_normed, None

    @staticmethod
    def gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        with kernel("norm_gated"):
            out.copy_(_norm(x, weight, eps, 0.0).view(out.shape))

    @staticmethod
    def gated_backward(
        grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, of_gate: Tensor, learns: bool
    ) -> tuple[Tensor, None]:
        with kernel("norm_gated_backward"):
            of_gate.copy_(grad.view(of_gate.shape))
            return grad.clone().view(x.shape), None


class Heads:
    """In place of `heads_triton`: what it launches, not what it computes."""

    @staticmethod
    def rotate(x: Tensor, *_: Any) -> Tensor:
        with kernel("heads_rotate"):
            return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def rotate_back(grad: Tensor, heads: Any, norm: Any, cos: Tensor, sin: Tensor, into: Tensor, learns: bool) -> None:
        with kernel("heads_rotate_back"):
            into.copy_(grad)

    @staticmethod
    def gate(x: Tensor, gate: Tensor) -> Tensor:
        with kernel("heads_gate"):
            return x.reshape(len(x), -1).clone()

    @staticmethod
    def gate_back(grad: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        with kernel("heads_gate_back"):
            return grad.clone().view(x.shape)


def table(launches: Launches, blocks: int, outside: bool = False) -> str:
    """Per block: a visit up and one down. By part, then by operator and who asks. outside: of visits, too."""
    parts = [*PARTS, *([REST] if outside else [])]
    lines = []
    for part in parts:
        lines.append(f"{part}: {sum(c for (mine, *_), c in launches.found.items() if mine == part) / blocks:.1f}")
        rows = sorted(((c, op, who) for (mine, op, who), c in launches.found.items() if mine == part), reverse=True)
        lines += [f"  {c / blocks:7.2f}  {op:40} {who}" for c, op, who in rows]
    return "\n".join([*lines, f"a block, up and down: {launches.total() / blocks:.1f}"])
