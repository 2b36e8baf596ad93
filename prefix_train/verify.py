"""The run's check of itself: packs against transformers' own unpatched model, one example at a time.

The standalone half uses none of the suite's layers, tables or losses. Both halves see the same weights; dropout is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import VerifyConfig
from configs.wording import counted
from prefix_train import anatomy
from prefix_train import model as models
from prefix_train.collate import collate, entry_weights
from prefix_train.evaluate import example_losses
from prefix_train.plan import Pack
from prefix_train.render import Example

WORDS = {
    "mean_loss": "mean loss",
    "example_mean": "an example's loss, on average",
    "example_max": "an example's loss, at most",
    "gradient": "worst gradient, of its norm",
}


@dataclass(frozen=True)
class Bounds:
    """Largest differences that pass. gradient: relative, of each tensor; None where it is reported only."""

    mean_loss: float
    example_mean: float
    example_max: float
    gradient: float | None


def bounds_for(options: VerifyConfig, dtype: torch.dtype) -> Bounds:
    """The configured bounds; where none are given, those of `dtype`.

    bfloat16: no worse than the public figures for a 27B model. float32: what rounding leaves.
    """
    default = Bounds(2e-4, 7e-3, 4e-2, None) if dtype == torch.bfloat16 else Bounds(1e-5, 1e-5, 1e-4, 1e-4)
    given = {key: getattr(options, key) for key in asdict(default)}
    return Bounds(**{key: getattr(default, key) if value is None else value for key, value in given.items()})


@dataclass(frozen=True)
class Half:
    """One way of computing: loss of each example by index, and the mean loss's gradient of each trainable tensor."""

    losses: dict[int, float]
    gradients: dict[str, Tensor]


def standalone(model: nn.Module, examples: Sequence[Example]) -> Half:
    """Each example alone through transformers' own classes. model: not patched, dropout off."""
    parameters = anatomy.trainable(model)
    found = {}
    for index, example in enumerate(examples):
        loss = _standalone_loss(model, example)
        (loss / len(examples)).backward()  # type: ignore[no-untyped-call]
        found[index] = loss.item()
    return Half(found, _take_gradients(parameters))


def standalone_inputs(example: Example, device: torch.device) -> dict[str, Any]:
    """What an unpatched model is given to compute `example` alone."""
    ids = torch.from_numpy(example.ids.copy())[None].to(device)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if example.images:
        pixels = np.concatenate([image.load() for image in example.images])
        inputs["pixel_values"] = torch.from_numpy(pixels).to(device)
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in example.images], device=device)
        inputs["mm_token_type_ids"] = torch.from_numpy((example.keys < 0).astype(np.int64))[None].to(device)
    return inputs


def _standalone_loss(model: nn.Module, example: Example) -> Tensor:
    device = next(model.parameters()).device
    inputs = standalone_inputs(example, device)
    ids = inputs["input_ids"]
    logits = model(**inputs).logits[0]
    predicted = torch.from_numpy(np.flatnonzero(example.target)).to(device)
    logits = logits[predicted - 1]
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[0, predicted])


def packed(root: models.Root, packs: Sequence[Pack], examples: Sequence[Example]) -> Half:
    """The same examples through packs. root: around the patched model."""
    parameters = anatomy.trainable(root.model)
    device = next(iter(parameters.values())).device
    counts = [int(example.target.sum()) for example in examples]
    weights = entry_weights("example", counts)
    found: dict[int, float] = {}
    for pack in packs:
        batch = collate(pack, examples, weights).to(device)
        out = root(batch)
        out.loss.backward()
        found |= example_losses(out.each, batch)
    return Half(found, _take_gradients(parameters))


def _take_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    taken = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        taken[name] = gradient.detach().to("cpu", torch.float64)
        parameter.grad = None
    return taken


def compare(pack: Half, alone: Half, bounds: Bounds) -> dict[str, Any]:
    """Differences of two halves, and whether each is within its bound: a document of built-in types.

    A gradient tensor's difference is relative to its norm, or to 1e-6 x the norm of all where that is larger.
    Raises ValueError where the halves do not cover the same examples and tensors, or there are none.
    """
    if pack.losses.keys() != alone.losses.keys() or pack.gradients.keys() != alone.gradients.keys():
        raise ValueError("the halves cover different examples or tensors")
    if not alone.losses or not alone.gradients:
        raise ValueError("nothing to compare: no example, or no trainable tensor")
    order = sorted(alone.losses)
    ours, theirs = (np.array([half.losses[index] for index in order]) for half in (pack, alone))
    differences = np.abs(ours - theirs)
    norms = {name: gradient.norm().item() for name, gradient in alone.gradients.items()}
    floor = 1e-6 * float(np.linalg.norm(list(norms.values())))
    relative = {
        name: (pack.gradients[name] - alone.gradients[name]).norm().item() / max(norms[name], floor) for name in norms
    }
    worst = max(relative, key=lambda name: relative[name])
    measured = {
        "mean_loss": float(abs(ours.mean() - theirs.mean())),
        "example_mean": float(differences.mean()),
        "example_max": float(differences.max()),
        "gradient": relative[worst],
    }
    allowed = asdict(bounds)
    failed = [key for key, value in measured.items() if allowed[key] is not None and not value <= allowed[key]]
    return {
        "passed": not failed,
        "failed": failed,
        "examples": len(order),
        "tensors": len(norms),
        "mean_loss_packed": float(ours.mean()),
        "mean_loss_standalone": float(theirs.mean()),
        "differences": measured,
        "bounds": allowed,
        "worst_gradient": worst,
    }


def said(found: Mapping[str, Any]) -> str:
    """What `compare` found, in a line."""
    differences = found["differences"]
    return (
        f"verify {'passed' if found['passed'] else 'FAILED in ' + ', '.join(found['failed'])}: "
        f"{counted(found['examples'], 'example')}, mean loss differs by {differences['mean_loss']:.1e}, the worst "
        f"of {counted(found['tensors'], 'gradient')} by {differences['gradient']:.1e}"
    )


def describe(found: Mapping[str, Any]) -> str:
    """The differences that `compare` found as a table, each with its bound."""
    lines = [f"  {'packs against examples alone':<32}{'differ by':>10}   at most"]
    for name, value in found["differences"].items():
        bound = found["bounds"][name]
        limit = "(not judged)" if bound is None else f"{bound:.1e}"
        failed = "   FAILED" if name in found["failed"] else ""
        lines.append(f"  {WORDS[name]:<32}{value:>10.1e}   {limit}{failed}")
    lines.append(f"  the worst gradient is that of {found['worst_gradient']}")
    return "\n".join(lines)
