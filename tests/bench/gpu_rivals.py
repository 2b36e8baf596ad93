"""What others offer for the same work, beside ours: time, memory and error.

    python -m tests.bench.gpu_rivals OUT.json [--seconds LIMIT] [--tiny]

`layer`: convolution and delta rule of one Gated DeltaNet layer over the pack's forest, forward and backward, by the
package `tree-recurrence` (as it decides by itself, and level by level) where it is importable. `standalone`: one whole
example through transformers' own model of one period of layers, recomputed by its own means, and the same example and
the pack through ours. A gate in wider numbers comes first each time. OUT is written anew after every figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prefix_train import anatomy, bench_gate, bench_measure, kernels
from prefix_train import model as models
from prefix_train.bench import random_examples
from prefix_train.bench_pack import Case
from prefix_train.deltanet import tree_conv, tree_delta_rule
from prefix_train.layout import Layout
from tests.bench.gpu_pieces import ODD, TINY, Report, Sizes, draw, errors, star, with_gradients

Mix = Callable[[Sequence[Tensor], Layout], Tensor]
"""Mixed inputs [T, C], weight [C, 4], g and beta [1, T, HV] -> [1, T, HV, V]."""


def parted(mixed: Tensor, sizes: Sizes) -> list[Tensor]:
    """[1, T, C] -> query, key, value."""
    heads, value_heads, size = sizes.recurrent
    parts = torch.split(mixed, [heads * size, heads * size, value_heads * size], -1)
    return [part.reshape(1, mixed.shape[1], -1, size) for part in parts]


def ours(name: str, sizes: Sizes, of: Sequence[Tensor], layout: Layout) -> Tensor:
    mixed, weight, g, beta = of
    convolved = tree_conv(mixed, weight, None, layout, kernels=name)[None]
    return tree_delta_rule(*parted(convolved, sizes), g, beta, layout, kernels=name)


def theirs(policy: Any, sizes: Sizes, of: Sequence[Tensor], layout: Layout) -> Tensor:
    """By tree-recurrence over the same kernels; on a CPU over its own references."""
    tree: Any = importlib.import_module("tree_recurrence")
    scans: Any = importlib.import_module("tree_recurrence.components.gated_delta_rule")
    convs: Any = importlib.import_module("tree_recurrence.components.conv")
    conv, rule = ("tree_recurrence.reference",) * 2
    if layout.device.type == "cuda":
        conv, rule = "fla.modules.causal_conv1d", "fla.ops.gated_delta_rule"
    causal_conv1d = importlib.import_module(conv).causal_conv1d
    chunk_rule = importlib.import_module(rule).chunk_gated_delta_rule
    mixed, weight, g, beta = of
    plan = plan_of(layout, tree)
    kind = convs.fla_conv if layout.device.type == "cuda" else convs.channels_first_conv
    convolved = tree.tree_conv(kind(causal_conv1d, weight, None, "silu"), mixed[None], plan, weight.shape[1])
    inputs = [*parted(convolved, sizes), g, beta]
    out: Tensor = tree.tree_scan(scans.gated_delta_rule_scan(chunk_rule), inputs, plan, policy=policy)
    return out


_plans: dict[int, Any] = {}


def plan_of(layout: Layout, tree: Any) -> Any:
    """Made once per forest, as ours is."""
    if id(layout) not in _plans:
        bounds = torch.tensor([0, *layout.lengths]).cumsum(0)
        given = {"tree_cu_seqlens_q": bounds, "tree_segment_parents": torch.tensor(layout.parents)}
        _plans[id(layout)] = tree.TreePlan.from_kwargs(given)
    return _plans[id(layout)]


def layer_inputs(sizes: Sizes, layout: Layout) -> list[Tensor]:
    heads, value_heads, size = sizes.recurrent
    device, total = layout.device, layout.total
    mixed = draw(device, total, (2 * heads + value_heads) * size)
    weight = draw(device, mixed.shape[1], 4, seed=1)
    g = -0.05 * draw(device, 1, total, value_heads, dtype=torch.float32, seed=2).abs()
    beta = draw(device, 1, total, value_heads, seed=3).sigmoid()
    return [x.requires_grad_() for x in (mixed, weight, g, beta)]


def layer(report: Report) -> None:
    sizes, device = report.sizes, report.device
    mine = "fla" if device.type == "cuda" else "reference"
    ways: dict[str, Mix] = {"ours": partial(ours, mine, sizes)}
    if device.type == "cuda":
        ways |= {f"ours, {name}": partial(ours, name, sizes) for name in ("fla_segments", "fla_forest")}
    if importlib.util.find_spec("tree_recurrence"):
        policy = importlib.import_module("tree_recurrence").Policy
        ways |= {"tree-recurrence": partial(theirs, None, sizes),
                 "tree-recurrence, by levels": partial(theirs, policy(fork_min_saved_tokens=0), sizes)}  # fmt: skip
    else:
        report.note("layer", "tree-recurrence", {"left_out": "not importable here"})
    odd = Layout.from_tree(*ODD).to(device)
    of, (_, value_heads, size) = layer_inputs(sizes, odd), sizes.recurrent
    grad = draw(device, 1, odd.total, value_heads, size, seed=4)
    wide = [x.detach().double().requires_grad_() for x in of]
    truth = with_gradients(ours("reference", sizes, wide, odd), wide, grad)
    right = {}
    for name, way in ways.items():
        found = errors(with_gradients(way(of, odd), of, grad), truth)
        report.note("layer", f"gate, {name}", {"out_x_weight_g_beta": found, "passed": max(found) < 2e-2})
        right |= {name: way} if max(found) < 2e-2 else {}
    layout = star(sizes, sizes.star, device)
    of, grad = layer_inputs(sizes, layout), draw(device, 1, layout.total, value_heads, size, seed=4)
    for name, way in right.items():
        if report.enough("layer", name):
            try:
                report.note("layer", name, report.seconds(partial(once, way, of, layout, grad)))
            except torch.OutOfMemoryError as error:
                report.note("layer", name, {"refused": str(error).splitlines()[0]})


def once(way: Mix, of: Sequence[Tensor], layout: Layout, grad: Tensor) -> list[Tensor]:
    return with_gradients(way(of, layout), of, grad)


def standalone(report: Report, case: Case) -> None:
    """transformers' own: logits of the targets alone, layers recomputed by its own switch."""
    config, device = case.config(), report.device
    if not report.enough("standalone", "transformers"):
        return
    base = bench_gate.build_on(device, dict(config.model.build), models.DTYPES[config.model.dtype])
    model = models.adapt(base, dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, dropout=0.0)))
    learned = list(anatomy.trainable(model).values())
    base.train()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    vocabulary = anatomy.find(model).head.out_features
    (example,) = random_examples(case.prefix, 1, case.length, vocabulary, config.seed)
    ids, count = torch.from_numpy(example.ids)[None].to(device), int(example.target.sum())

    def update() -> None:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
        loss = F.cross_entropy(logits.float(), ids[0, -count:])
        torch.autograd.grad(loss, learned)

    with torch.autocast(device.type, dtype=models.DTYPES[config.model.dtype]):
        figures: dict[str, Any] = report.seconds(update)
    figures |= {"positions": ids.shape[1], "attention": base.config._attn_implementation}
    report.note("standalone", "transformers", figures)


def packs(report: Report, case: Case) -> None:
    """Ours over the same examples: whole updates of the pack, and of one example alone."""
    for row in ("packed", "standalone"):
        if report.enough("standalone", f"ours, {row}"):
            found = bench_measure.measure(row, case, report.device)
            kept = ("examples", "first_s", "median_s", "positions", "memory", "kernels", "model_tflops")
            report.note("standalone", f"ours, {row}", {name: found[name] for name in kept})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--geometry", default="qwen3.6-27b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = TINY if given.tiny else Sizes()
    report = Report(given.out, time.monotonic() + given.seconds, device, sizes)
    case = Case(
        given.geometry, sizes.prefix, *sizes.star, layers=given.layers, warm=1, alone=1, profile=False,
        overrides=("memory.offload=auto", "memory.keep_attention=auto"),
    )  # fmt: skip
    if device.type == "cuda":
        report.note("machine", "gpu", {"name": torch.cuda.get_device_name(), "pins": kernels.use_pins()})
    wrong = False
    for name, part in (
        ("layer", layer),
        ("standalone", partial(standalone, case=case)),
        ("packs", partial(packs, case=case)),
    ):
        try:
            part(report)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            report.note(name, "failed", {"error": str(error)[:500]})
            wrong = True
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
