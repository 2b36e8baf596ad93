"""Parts of a layer by themselves, at the size of the 27B geometry's pack, each kernel beside the one it would replace.

    python -m tests.bench.gpu_pieces OUT.json [--seconds LIMIT] [--only PART ...] [--tiny]

A part begins with its own gate, against plain torch in wider numbers at odd lengths; without it there is no figure.
OUT is written anew after every figure; what the limit leaves out is named there. `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, apply_rotary_pos_emb

from configs import runfolder
from prefix_train import bench_kernels, bench_measure, frozen, fused, pieces
from prefix_train import heads as heads_kernels
from prefix_train.attention import tree_attention
from prefix_train.deltanet import tree_conv, tree_conv_parts, tree_delta_rule
from prefix_train.dropout import SeededDropout
from prefix_train.layout import Layout

ODD = ([333, 70, 1, 129, 65, 2], [-1, 0, 1, 0, 3, 0])
"""A forest whose lengths suit no kernel's blocks."""


@dataclass(frozen=True)
class Sizes:
    hidden: int = 5120
    heads: tuple[int, int, int] = (24, 4, 256)
    recurrent: tuple[int, int, int] = (16, 48, 128)
    out: int = 12288
    prefix: int = 64_000
    star: tuple[int, int] = (80, 1000)
    many: tuple[int, int] = (2000, 32)
    repeats: int = 3


TINY = Sizes(64, (4, 2, 32), (2, 4, 32), 96, 70, (3, 17), (20, 2), 1)


@dataclass
class Report:
    """What is known so far, written to `out` whenever something is added."""

    out: Path
    until: float
    device: torch.device
    sizes: Sizes
    found: dict[str, Any] = field(default_factory=dict)

    def note(self, part: str, name: str, figures: dict[str, Any]) -> None:
        self.found.setdefault(part, {})[name] = figures
        print(f"{part}: {name}: {figures}", flush=True)
        runfolder.write_json(self.out, self.found)

    def enough(self, part: str, name: str) -> bool:
        """Is there time left for another figure?"""
        if time.monotonic() < self.until:
            return True
        self.note(part, name, {"left_out": "no time"})
        return False

    def seconds(self, run: Callable[[], object]) -> dict[str, float]:
        """first: the first call's, all that is compiled or planned in it. median: of the next ones. gib: their peak
        above what was there."""
        once = partial(bench_measure.seconds, run, self.device)
        found, before = {"first_s": once()}, 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        found["median_s"] = statistics.median(once() for _ in range(self.sizes.repeats))
        if self.device.type == "cuda":
            found["gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        return found


def draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def with_gradients(out: Tensor, of: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, list(of), grad.to(out.dtype))]


def errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, truth, strict=True)]


def star(sizes: Sizes, of: tuple[int, int], device: torch.device) -> Layout:
    return Layout.from_tree([sizes.prefix, *[of[1]] * of[0]], [-1, *[0] * of[0]]).to(device)


def attention_inputs(sizes: Sizes, layout: Layout, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    query, key, size = sizes.heads
    made = [draw(layout.device, 1, layout.total, heads, size, seed=n) for n, heads in enumerate((query, key, key))]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def attend(name: str, layout: Layout, of: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    out = tree_attention(*of, layout, 0.06, name)
    return [out] if grad is None else with_gradients(out, of, grad)


def attention(report: Report) -> None:
    """Pieces merged one after the other, and joined in one pass."""
    sizes, device = report.sizes, report.device
    kernels = ["merged", "joined"] if device.type == "cuda" else ["merged", "dense"]
    odd = Layout.from_tree(*ODD).to(device)
    of, grad = attention_inputs(sizes, odd), draw(device, 1, odd.total, *sizes.heads[::2], seed=9)
    truth = attend("dense", odd, [x.detach().double().requires_grad_() for x in of], grad)
    passed = []
    for name in kernels:
        found = errors(attend(name, odd, of, grad), truth)
        report.note("attention", f"gate, {name}", {"out_q_k_v": found, "passed": max(found) < 1e-2})
        passed += [name] if max(found) < 1e-2 else []
    for shape in ("star", "many"):
        layout = star(sizes, getattr(sizes, shape), device)
        of, grad = attention_inputs(sizes, layout), draw(device, 1, layout.total, *sizes.heads[::2], seed=9)
        for name in passed:
            if not report.enough("attention", f"{shape}, {name}"):
                continue
            whole = partial(attend, name, layout, of, grad)
            figures: dict[str, Any] = report.seconds(whole)
            with torch.no_grad():
                figures["forward_s"] = report.seconds(partial(attend, name, layout, of, None))["median_s"]
            report.note("attention", f"{shape}, {name}", {**figures, **bench_kernels.launched(whole, device, 25)})


def convolve(name: str, layout: Layout, x: Tensor, weight: Tensor, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Query, key and value, and where there is a graph the gradient of x from theirs."""
    parts = tree_conv_parts(x, weight, None, layout, [grad.shape[1] for grad in grads], kernels=name)
    return torch.autograd.grad(parts, [x], grads) if torch.is_grad_enabled() else parts


def convolution(report: Report) -> None:
    """Over a buffer with copies, each segment by itself, the forest without copies, and causal-conv1d."""
    sizes, device = report.sizes, report.device
    channels = (2 * sizes.recurrent[0] + sizes.recurrent[1]) * sizes.recurrent[2]
    kernels = ["reference"]
    if device.type == "cuda":
        kernels = ["fla", "fla_segments", "fla_forest"] + ["fla_cuda"] * bool(importlib.util.find_spec("causal_conv1d"))
    odd = Layout.from_tree(*ODD).to(device)
    x, weight = draw(device, odd.total, channels), draw(device, channels, 4, seed=1)
    of, grad = [x.requires_grad_(), weight.requires_grad_()], draw(device, odd.total, channels, seed=2)
    wide = [one.detach().double().requires_grad_() for one in of]
    truth = with_gradients(tree_conv(*wide, None, odd), wide, grad)
    passed = []
    for name in kernels:
        found = errors(with_gradients(tree_conv(*of, None, odd, kernels=name), of, grad), truth)
        report.note("convolution", f"gate, {name}", {"out_x_weight": found, "passed": max(found) < 1e-2})
        passed += [name] if max(found) < 1e-2 else []
    for shape in ("star", "many"):
        layout = star(sizes, getattr(sizes, shape), device)
        x, frozen = draw(device, layout.total, channels).requires_grad_(), weight.detach()
        heads, value_heads, size = sizes.recurrent
        grads = [draw(device, layout.total, count * size, seed=2) for count in (heads, heads, value_heads)]
        for name in passed:
            if report.enough("convolution", f"{shape}, {name}"):
                figures: dict[str, Any] = report.seconds(partial(convolve, name, layout, x, frozen, grads))
                with torch.no_grad():
                    forward = report.seconds(partial(convolve, name, layout, x, frozen, grads))
                report.note("convolution", f"{shape}, {name}", {**figures, "forward_s": forward["median_s"]})


def recur(name: str, layout: Layout, of: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return with_gradients(tree_delta_rule(*of, layout, kernels=name), of, grad)


def recurrence(report: Report) -> None:
    """Gated DeltaNet's rule by levels; of very many short continuations too."""
    sizes, device = report.sizes, report.device
    heads, value_heads, size = sizes.recurrent
    kernels = "fla" if device.type == "cuda" else "reference"
    for shape in ("star", "many"):
        if report.enough("recurrence", shape):
            layout = star(sizes, getattr(sizes, shape), device)
            total = layout.total
            of = [draw(device, 1, total, count, size, seed=n) for n, count in enumerate((heads, heads, value_heads))]
            of.append(-0.05 * draw(device, 1, total, value_heads, dtype=torch.float32).abs())
            of.append(draw(device, 1, total, value_heads, seed=5).sigmoid())
            of, grad = [x.requires_grad_() for x in of], draw(device, 1, total, value_heads, size, seed=6)
            report.note("recurrence", shape, report.seconds(partial(recur, kernels, layout, of, grad)))


def adapted(sizes: Sizes, device: torch.device, counted: bool) -> Any:
    """A linear module with an adapter and dropout, its weights the same for both kinds of masks."""
    torch.manual_seed(0)
    with torch.device(device):
        holder = nn.Sequential(nn.Linear(sizes.hidden, sizes.out, bias=False)).to(torch.bfloat16)
        config = LoraConfig(r=8, lora_dropout=0.05, target_modules=["0"])
        made = get_peft_model(holder, config, autocast_adapter_dtype=False).base_model.model[0]  # type: ignore[arg-type,index]
    made.lora_dropout["default"] = SeededDropout(0.05, "here", counted)
    made.lora_dropout["default"].draw = "1/2/3"
    nn.init.normal_(made.lora_B["default"].weight, 0.0, 0.02)
    return made.to(torch.bfloat16).train()


def through(module: Any, forward: Any, sizes: Sizes, rows: int, device: torch.device) -> list[Tensor]:
    """Output and gradients of x and of the adapter."""
    learned = [one for one in module.parameters() if one.requires_grad]
    x = draw(device, 1, rows, sizes.hidden).requires_grad_()
    out = forward(x)
    return with_gradients(out, [x, *learned], draw(device, *out.shape, seed=3))


def adapter(report: Report) -> None:
    """A linear module with an adapter: masks written out, and drawn in registers."""
    sizes, device = report.sizes, report.device
    for name in ("drawn", "counted"):
        module = adapted(sizes, device, name == "counted")
        fast = frozen.Adapted(module, 16384, module)
        plain = through(module, module, sizes, 2048 + 77, device)  # the same masks, written out
        found = errors(through(module, fast, sizes, 2048 + 77, device), plain)
        report.note("adapter", f"gate, {name}", {"out_x_a_b": found, "passed": max(found) < 1e-2})
        if max(found) < 1e-2 and report.enough("adapter", name):
            rows = sizes.prefix + sizes.star[0] * sizes.star[1]
            report.note("adapter", name, report.seconds(partial(through, module, fast, sizes, rows, device)))


def plans(report: Report) -> None:
    """What a length that attention has not seen yet costs: cuDNN plans each shape anew."""
    sizes, device = report.sizes, report.device
    firsts, warm = [], []
    for number in range(6):
        length = sizes.prefix // 64 + 64 * number + 64
        layout = Layout.from_tree([length, *[length // 8] * 4], [-1, 0, 0, 0, 0]).to(device)
        of = attention_inputs(sizes, layout)
        grad = draw(device, 1, layout.total, *sizes.heads[::2])
        run = partial(attend, "merged", layout, of, grad)
        firsts.append(bench_measure.seconds(run, device))
        warm.append(bench_measure.seconds(run, device))
    more = statistics.median(a - b for a, b in zip(firsts[1:], warm[1:], strict=True))
    report.note(
        "plans", "per new shape of prefix and continuations", {"first_s": firsts, "warm_s": warm, "more_s": more}
    )


def grouped(report: Report) -> None:
    """Keys and values once for each query head, or as they are, which cuDNN takes: over the pack, however heads lie."""
    sizes, device = report.sizes, report.device
    name = "joined" if device.type == "cuda" else "merged"
    odd = Layout.from_tree(*ODD).to(device)
    of, grad = attention_inputs(sizes, odd), draw(device, 1, odd.total, *sizes.heads[::2], seed=9)
    truth = attend("dense", odd, [x.detach().double().requires_grad_() for x in of], grad)
    layout = star(sizes, sizes.star, device)
    grads = draw(device, 1, layout.total, *sizes.heads[::2], seed=9)
    for native in (False, True):
        how = "native" if native else "one head each"
        with patch.object(pieces, "GROUPED", native):
            found = errors(attend(name, odd, of, grad), truth)
            report.note("grouped", f"gate, {how}", {"out_q_k_v": found, "passed": max(found) < 1e-2})
            for first in ("tokens", "heads") if max(found) < 1e-2 else ():
                if not report.enough("grouped", f"star, {how}, {first} first"):
                    continue
                given = attention_inputs(sizes, layout)
                if first == "heads":
                    given = [x.detach().contiguous().requires_grad_() for x in given]
                whole = partial(attend, name, layout, given, grads)
                figures: dict[str, Any] = report.seconds(whole)
                with torch.no_grad():
                    figures["forward_s"] = report.seconds(partial(attend, name, layout, given, None))["median_s"]
                figures |= bench_kernels.launched(whole, device, 25)
                report.note("grouped", f"star, {how}, {first} first", figures)


def around_attention(
    how: str, norms: Sequence[nn.Module], of: Sequence[Tensor], cos: Tensor, sin: Tensor
) -> list[Tensor]:
    """Query, key and what the gate lets through. of: projections of queries with gates and of keys, [T, H, ...], and
    what attention gave. how: `model.heads`."""
    query_gate, key, attended = of
    if how == "fused":
        query, gate = heads_kernels.rotated(query_gate, heads_kernels.Norm.of(norms[0]), cos, sin, True)
        key, _ = heads_kernels.rotated(key, heads_kernels.Norm.of(norms[1]), cos, sin)
        assert gate is not None
        return [query, key, heads_kernels.gated(attended, gate)]
    query, gate = query_gate[None].chunk(2, dim=-1)
    turned = [norm(x).transpose(1, 2) for norm, x in zip(norms, (query, key[None]), strict=True)]
    turned = apply_rotary_pos_emb(*turned, cos[None], sin[None])
    opened = attended.flatten(1) * torch.sigmoid(gate.reshape(len(attended), -1))
    return [*(x.transpose(1, 2).squeeze(0) for x in turned), opened]


def heads(report: Report) -> None:
    """Norm, rotary embedding and gate: the model's own operations with Liger's norms, and one kernel before and behind.

    Backward of the latter writes over its inputs: for their times they are what the last repetition left.
    """
    sizes, device = report.sizes, report.device
    (count, keys, size), kernels = sizes.heads, ["torch", "fused"] if device.type == "cuda" else ["torch"]
    norms = [Qwen3_5RMSNorm(size, eps=1e-6).to(device, torch.bfloat16) for _ in range(2)]
    for norm in norms:
        nn.init.normal_(norm.weight, 0.0, 0.3).requires_grad_(False)
    wide = [copy.deepcopy(norm).double() for norm in norms]
    for norm in norms:
        norm.forward = fused.Norm(norm, "auto", norm.forward)

    def run(how: str, rows: int, wider: bool = False, graph: bool = True) -> list[Tensor]:
        shapes = [(rows, count, 2 * size), (rows, keys, size), (rows, count, size)]
        of = [kept.setdefault((n, *shape), draw(device, *shape, seed=n)) for n, shape in enumerate(shapes)]
        tables = [kept.setdefault((n, rows), draw(device, rows, size // 4, seed=n)) for n in (3, 4)]
        if wider:
            of, tables = [x.double() for x in of], [x.double() for x in tables]
        of = [x.detach().requires_grad_(graph) for x in of]
        found = around_attention(how, wide if wider else norms, of, *tables)
        if not graph:
            return found
        grads = [kept.setdefault((9, *x.shape), draw(device, *x.shape, seed=9)).to(x.dtype) for x in found]
        return [*(x.detach() for x in found), *torch.autograd.grad(found, of, grads)]

    rows, passed, bounds = 2048 + 77, [], [1e-3] * 6
    for how in kernels:
        kept: dict[tuple[int, ...], Tensor] = {}
        truth = [x.clone() for x in run("torch", rows, wider=True)]
        found = errors(run(how, rows), truth)
        good = all(error <= bound for error, bound in zip(found, bounds, strict=True)) if how == "fused" else True
        bounds = [max(1.02 * error, 1e-3) for error in found]
        report.note("heads", f"gate, {how}", {"q_k_out_and_gradients": found, "passed": good})
        passed += [how] if good else []
    for how in passed:
        if report.enough("heads", how):
            kept = {}
            whole = partial(run, how, sizes.prefix + sizes.star[0] * sizes.star[1])
            figures: dict[str, Any] = report.seconds(whole)
            figures["forward_s"] = report.seconds(partial(whole, graph=False))["median_s"]
            report.note("heads", how, {**figures, **bench_kernels.launched(whole, device, 25)})


PARTS = {part.__name__: part for part in (attention, adapter, convolution, recurrence, plans, grouped, heads)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--only", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = TINY if given.tiny else Sizes()
    report = Report(given.out, time.monotonic() + given.seconds, device, sizes)
    if device.type == "cuda":
        from prefix_train import kernels

        report.note("machine", "gpu", {"name": torch.cuda.get_device_name(), "pins": kernels.use_pins(),
                                       "tflops": bench_measure.matrix_ceiling(device)})  # fmt: skip
    wrong = False
    for name in given.only:
        try:
            PARTS[name](report)
        except (RuntimeError, ValueError) as error:
            report.note(name, "failed", {"error": str(error)[:500]})
            wrong = True
    gates = [figures for part in report.found.values() for figures in part.values() if figures.get("passed") is False]
    return 1 if wrong or gates else 0


if __name__ == "__main__":
    sys.exit(main())
