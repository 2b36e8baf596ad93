"""What a finished run says of itself: held-out quality, its check of itself, what it gives away, `result.json`.

It is judged on a model that is loaded anew: whatever was patched, sharded or recomputed in training plays no part in
how. All ranks answer held-out prompts, each with a model of its own; the rest one process does after the process group
is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_flash_linear_attention_available

from configs import runfolder
from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import anatomy, engines, evaluate, export, machine, precision, verify
from prefix_train import model as models
from prefix_train.dist import Ranks
from prefix_train.evaluate import Scored
from prefix_train.heldout import Heldout
from prefix_train.metrics import Metric
from prefix_train.plan import plan_heldout
from prefix_train.render import Example
from prefix_train.tensors import check_names
from prefix_train.tree import build_forest

COMMIT = Path(runfolder.CODE) / "COMMIT.json"


class BadOutcome(RuntimeError):
    """Training ended, but its result cannot be trusted: what was found. `result.json` says so too."""


@dataclass(frozen=True)
class Closing:
    """What training leaves behind. trained: every trained tensor by name, full, on the CPU, where a rank needs them.

    hash_before: of the same tensors before the first update. losses: of the held-out examples, by index. metrics: of
    the answers. covered, waiting: how many trained tensors have had a gradient in this life, names of those that have
    not. skipped: one line for each example that was left out. totals: the reporter's. masks: `dropout.counted_masks` of
    the model that was trained.
    """

    trained: dict[str, Tensor]
    hash_before: str
    ranks: int
    heldout: Heldout | None
    losses: dict[int, float]
    metrics: list[Metric]
    covered: int
    waiting: list[str]
    skipped: list[str]
    totals: dict[str, Any]
    masks: str | None


@dataclass(frozen=True)
class Restored:
    """The trained model as transformers computes it, and its answers; none where none were asked for."""

    model: nn.Module
    processor: Any
    scored: Scored | None


def answers_wanted(config: Config) -> bool:
    """Whether a run's end generates answers, for which every rank needs the trained tensors."""
    return config.data.heldout is not None and config.evaluate.generate


def restored(config: Config, closing: Closing, ranks: Ranks) -> Restored | None:
    """The model of `restore` and its answers, which all ranks share; none where no answers are wanted.

    Every rank calls it. Raises UserError on every rank where one cannot load the model or read an example.
    """
    if closing.heldout is None or not answers_wanted(config):
        return None
    model, processor = ranks.together(lambda: restore(config, closing.trained, ranks.device))
    return Restored(model, processor, answered(model, processor, closing.heldout, config, closing.metrics, ranks))


def write(run: Path, config: Config, closing: Closing, ready: Restored | None, device: torch.device) -> dict[str, Any]:
    """Judge the trained model, export it, write its predictions and `result.json`; its content.

    Raises, after writing, BadOutcome where the model is not what packs were computed with or nothing was trained, and
    UserError where a user's metric failed.
    """
    if ready is None:
        ready = Restored(*restore(config, closing.trained, device, whole=config.engine == "sharded"), None)
    model, processor = ready.model, ready.processor
    folder = run / (runfolder.ADAPTER if config.train.trainable == "adapter" else runfolder.WEIGHTS)
    exported = export.export(model, processor, closing.trained, folder, run)
    result: dict[str, Any] = {
        "name": config.name,
        "run": str(run),
        "seed": config.seed,
        "ranks": closing.ranks,
        "attempt": runfolder.process_attempt(),
        "commit": commit(run),
        **closing.totals,
        "layers": len(anatomy.find(model).layers),
        "tensors": {"trained": len(closing.trained), "covered": closing.covered, "without_gradient": closing.waiting},
        "kernels": kernels(config, device, closing.masks),
        "skipped": closing.skipped,
        "hash_before": closing.hash_before,
        "hash_after": exported.digest,
        "export": str(folder),
    }
    if closing.heldout is not None:
        result |= {"heldout_examples": len(closing.losses), "heldout_loss": fmean(closing.losses.values())}
        if ready.scored is not None:
            result |= evaluate.figures(ready.scored) | {"chance": config.evaluate.chance}
            place = run / runfolder.EVALUATIONS / f"update-{closing.totals['updates']:06d}"
            summary = {"update": closing.totals["updates"], "data": str(closing.heldout.path), **_judged(result)}
            result["predictions"] = str(evaluate.write(place, ready.scored, closing.losses, summary, run))
        if config.verify.examples:
            result["verify"] = check(model, closing.heldout.examples[: config.verify.examples], config)
    runfolder.write_json(run / runfolder.RESULT, result, run=run)
    if exported.digest == closing.hash_before:
        raise BadOutcome(f"all {len(closing.trained)} trained tensors are to the bit what they were before training")
    if not result.get("verify", {"passed": True})["passed"]:
        raise BadOutcome(
            f"packs differ from standalone examples in {', '.join(result['verify']['failed'])}; "
            f"see verify in {run / runfolder.RESULT}"
        )
    if ready.scored is not None and ready.scored.mistake is not None:
        raise UserError(ready.scored.mistake)
    return result


def _judged(result: dict[str, Any]) -> dict[str, Any]:
    """What a result says of held-out quality."""
    named = ("heldout_examples", "heldout_loss", "metrics", "generated", "chance", "mistake")
    return {name: result[name] for name in named if name in result}


def kernels(config: Config, device: torch.device, masks: str | None = None) -> dict[str, str]:
    """What computed the packs, and whether transformers' own model had its fast kernels or fell back to torch.

    masks: how counted masks were made, where they are counted.
    """
    fast = is_flash_linear_attention_available() and device.type == "cuda"
    return {
        **({} if masks is None else {"adapter_masks": masks}),
        **machine.chosen(config, device)._asdict(),
        "standalone_deltanet": "flash-linear-attention" if fast else "transformers' torch reference",
    }


def lines(result: dict[str, Any]) -> list[str]:
    """What a person wants to know of `result`."""
    said = []
    if "heldout_loss" in result:
        said.append(f"held-out loss {result['heldout_loss']:.4f} over {counted(result['heldout_examples'], 'example')}")
    said += evaluate.lines(result)
    if "verify" in result:
        said.append(verify.said(result["verify"]))
    return said


def restore(
    config: Config, trained: dict[str, Tensor], device: torch.device, whole: bool = True
) -> tuple[nn.Module, Any]:
    """The model of `config` with the trained tensors (all of them and no others), and its processor.

    In eval mode, computing as transformers does: not patched, not sharded. Where it is not wanted whole, weights that
    pass through in training are left out: then it can be exported, and nothing else.
    """
    model, processor = engines.load(config, whole)
    adapted = models.adapt(model, config)
    parameters = anatomy.trainable(adapted)
    check_names("the run's result", trained, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(trained[name])
    return adapted.to(device) if whole else adapted, processor


def answered(
    model: nn.Module, processor: Any, heldout: Heldout, config: Config, metrics: Sequence[Metric], ranks: Ranks
) -> Scored:
    """The answers that the model of `restore` generates, scored. Every rank calls it."""
    tokenizer = getattr(processor, "tokenizer", processor)
    with torch.no_grad(), precision.Copies(model, models.DTYPES[config.model.dtype]):
        return heldout.answers(anatomy.find(model).base, tokenizer, config, metrics, ranks)


def check(model: nn.Module, examples: Sequence[Example], config: Config) -> dict[str, Any]:
    """Compare packs with standalone examples: losses and gradients. `model`, of `restore`, is patched in the end."""
    dtype = models.DTYPES[config.model.dtype]
    with precision.Copies(model, dtype):
        alone = verify.standalone(model, examples)
    models.make_ready(model, config)
    train = config.train
    root = models.Root(model, dtype, train.loss_chunk_rows, images=False, chunk_words=train.loss_chunk_words)
    forest = build_forest((example.keys for example in examples), config.pack.min_shared)
    packs = plan_heldout(config, forest, ranks=1).updates[0][0]
    return verify.compare(verify.packed(root, packs, examples), alone, verify.bounds_for(config.verify, dtype))


def commit(run: Path) -> str | None:
    """The commit that the run's frozen code is of; none where that is not known."""
    if not (run / COMMIT).is_file():
        return None
    found: str | None = runfolder.read_json(run / COMMIT)["commit"]
    return found
