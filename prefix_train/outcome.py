"""What a finished run says of itself: held-out quality, its check of itself, what it gives away, `result.json`.

One process does this after the process group is gone, on a model that it loads anew: whatever was patched, sharded or
recomputed in training plays no part in how the result is judged.
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
from configs.schema import Config
from prefix_train import anatomy, attention, deltanet, engines, evaluate, export, fused, precision, verify
from prefix_train import model as models
from prefix_train.heldout import Heldout
from prefix_train.plan import plan_heldout
from prefix_train.render import Example
from prefix_train.tensors import check_names
from prefix_train.tree import build_forest

COMMIT = Path(runfolder.CODE) / "COMMIT.json"


class BadOutcome(RuntimeError):
    """Training ended, but its result cannot be trusted: what was found. `result.json` says so too."""


@dataclass(frozen=True)
class Closing:
    """What training leaves behind. trained: every trained tensor by name, full, on the CPU.

    hash_before: of the same tensors before the first update. losses: of the held-out examples, by index. covered,
    waiting: how many trained tensors have had a gradient in this life, names of those that have not. skipped: one line
    for each example that was left out. totals: the reporter's.
    """

    trained: dict[str, Tensor]
    hash_before: str
    ranks: int
    heldout: Heldout | None
    losses: dict[int, float]
    covered: int
    waiting: list[str]
    skipped: list[str]
    totals: dict[str, Any]


def write(run: Path, config: Config, closing: Closing, device: torch.device) -> dict[str, Any]:
    """Judge the trained model, export it, write `result.json`; its content.

    Raises BadOutcome, after writing, where the model is not what packs were computed with or nothing was trained.
    """
    model, processor = restore(config, closing.trained, device, whole=config.engine == "sharded")
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
        "kernels": kernels(config, device),
        "skipped": closing.skipped,
        "hash_before": closing.hash_before,
        "hash_after": exported.digest,
        "export": str(folder),
    }
    if closing.heldout is not None:
        result |= {"heldout_examples": len(closing.losses), "heldout_loss": fmean(closing.losses.values())}
        result |= answered(model, processor, closing.heldout, config)
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
    return result


def kernels(config: Config, device: torch.device) -> dict[str, str]:
    """What computed the packs, and whether transformers' own model had its fast kernels or fell back to torch."""
    fast = is_flash_linear_attention_available() and device.type == "cuda"
    return {
        "attention": attention.resolve_kernels(config.model.attention, device, models.DTYPES[config.model.dtype]),
        "elementwise": fused.resolve(config.model.elementwise, device),
        "deltanet": deltanet.resolve_kernels(config.model.deltanet, device),
        "standalone_deltanet": "flash-linear-attention" if fast else "transformers' torch reference",
    }


def lines(result: dict[str, Any]) -> list[str]:
    """What a person wants to know of `result`."""
    said = []
    if "heldout_loss" in result:
        said.append(f"held-out loss {result['heldout_loss']:.4f} over {result['heldout_examples']} examples")
    if "accuracy" in result:
        chance = "" if result["chance"] is None else f"; chance is {result['chance']:.0%}"
        fields = ", ".join(f"{name} {share:.1%}" for name, share in result["fields"].items())
        said.append(f"answered exactly {result['accuracy']:.1%}{chance}" + (f" (by field: {fields})" if fields else ""))
    if "verify" in result:
        found = result["verify"]
        differences = found["differences"]
        said.append(
            f"verify {'passed' if found['passed'] else 'FAILED in ' + ', '.join(found['failed'])}: "
            f"{found['examples']} examples, mean loss differs by {differences['mean_loss']:.1e}, the worst of "
            f"{found['tensors']} gradients by {differences['gradient']:.1e}"
        )
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


def answered(model: nn.Module, processor: Any, heldout: Heldout, config: Config) -> dict[str, Any]:
    """The answers that the model of `restore` generates against those expected; nothing without `evaluate.generate`."""
    if not config.evaluate.generate:
        return {}
    tokenizer = getattr(processor, "tokenizer", processor)
    with torch.no_grad(), precision.Copies(model, models.DTYPES[config.model.dtype]):
        answers = evaluate.answers(
            anatomy.find(model).base,
            tokenizer,
            heldout.examples,
            config.evaluate.max_new_tokens,
            config.pack.min_shared,
        )
    measured = evaluate.accuracy(answers)
    return {"accuracy": measured["exact"], "chance": config.evaluate.chance, "fields": measured["fields"]}


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
