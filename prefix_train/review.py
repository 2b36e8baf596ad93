"""A run folder looked at again, after the run: verify, evaluate. From a checkpoint, anew."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from configs import compose, metric_names, runfolder
from configs.errors import UserError
from configs.schema import Config
from prefix_train import anatomy, checkpoint, dist, engines, export, metrics, outcome
from prefix_train import evaluate as evaluation
from prefix_train import model as models
from prefix_train.dist import Ranks
from prefix_train.heldout import Heldout
from prefix_train.render import Renderer
from prefix_train.rows import check_name
from prefix_train.tensors import TensorError


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `prefix-train evaluate` was asked for. update: of the checkpoint, none: the newest. base: no checkpoint, but
    the model as it was before the first update. data: another file than the run's own. changes: `evaluate.key=value`.
    """

    update: int | None = None
    base: bool = False
    data: Path | None = None
    changes: tuple[str, ...] = ()

    def config(self, own: Config) -> Config:
        """The run's `own` configuration with what was asked for. Raises UserError."""
        if self.base and self.update is not None:
            raise UserError(f"--base is the model before the first update: leave out --checkpoint {self.update}")
        for change in self.changes:
            if not change.startswith("evaluate."):
                raise UserError(f"{change}: the options of a run are frozen, all but evaluate.*; leave it out")
        found = compose.with_changes(own, self.changes)
        given = tuple(metric_names.absolute(name, Path.cwd()) for name in found.evaluate.metrics)
        found = dataclasses.replace(found, evaluate=dataclasses.replace(found.evaluate, metrics=list(given)))
        if self.data is not None:
            path = os.path.abspath(check_name(self.data))
            found = dataclasses.replace(found, data=dataclasses.replace(found.data, heldout=path))
        return found

    @property
    def has_metrics(self) -> bool:
        """Whether metrics were named anew: a user's are then read as their files are now, not as the run froze them."""
        return any(re.match(r"evaluate\.metrics\b", change) for change in self.changes)

    def name(self, config: Config, checkpoint_folder: Path | None) -> str:
        """Of the folder of what is found: the same for the same checkpoint, data and options. config: of `config`.

        Never a checkpoint's name alone: that is the folder of what the run found itself, at its end.
        """
        name = checkpoint_folder.name if checkpoint_folder is not None else "base"
        if checkpoint_folder is not None and self.data is None and not self.changes:
            return f"{name}-later"
        if self.data is not None:
            slug = re.sub(r"[^\w.-]+", "_", self.data.stem)[:48]
            name += f"-{slug}-{_short(os.path.abspath(self.data))}"
        if self.changes:
            slug = re.sub(r"[^A-Za-z0-9.-]+", "_", " ".join(sorted(self.changes)).replace("evaluate.", ""))[:32]
            name += f"-{slug}-{_short(json.dumps(dataclasses.asdict(config.evaluate), sort_keys=True))}"
        return name


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


@dataclasses.dataclass(frozen=True)
class Review:
    """A trained model as transformers computes it, its processor, its held-out examples, on one device."""

    config: Config
    trained: dict[str, Tensor]
    model: nn.Module
    processor: Any
    ranks: Ranks

    @classmethod
    def of(cls, run: Path) -> Review:
        """Load the newest checkpoint of `run`. Raises UserError where there is none."""
        config, device = compose.from_run(run), torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls.at(config, find_checkpoint(run, None), Ranks(0, 1, device, None))

    @classmethod
    def at(cls, config: Config, folder: Path | None, ranks: Ranks) -> Review:
        """Load the checkpoint in `folder`; none: the model as it was before the first update.

        Raises UserError where the checkpoint is damaged or not of this model.
        """
        torch.set_num_threads(config.train.threads)
        skeleton, processor = engines.load(config, whole=folder is None)
        adapted = models.adapt(skeleton, config)
        if folder is None:
            return cls(config, {}, adapted.to(ranks.device), processor, ranks)
        try:
            trained = export.from_checkpoint(folder, adapted)
        except TensorError as error:
            raise UserError(str(error)) from error
        model, processor = outcome.restore(config, trained, ranks.device)
        return cls(config, trained, model, processor, ranks)

    def heldout(self, config: Config) -> Heldout:
        """The held-out examples of `config`. Raises UserError where it names none."""
        renderer = Renderer(self.processor, anatomy.find(self.model).base.config, targets=self.config.data.targets)
        found = Heldout.load(config, renderer, self.ranks)
        if found is None:
            raise UserError("data.heldout is not set: name a chat JSONL file with held-out examples")
        return found


def verify(run: Path, examples: int) -> dict[str, Any]:
    """Packs against transformers' own model on the first `examples` held-out examples; see `verify.compare`."""
    review = Review.of(run)
    heldout = review.heldout(review.config)
    return outcome.check(review.model, heldout.examples[:examples], review.config)


def find_checkpoint(run: Path, update: int | None) -> Path:
    """The folder of the checkpoint of `update`, or the newest. Raises UserError where there is none."""
    found = {int(folder.name.removeprefix("update-")): folder for folder in checkpoint.complete(run)}
    if not found:
        raise UserError(f"{run} has no checkpoint yet: nothing has been trained that could be looked at")
    if update is not None and update not in found:
        raise UserError(f"{run} has no checkpoint of update {update}; it has those of {', '.join(map(str, found))}")
    return found[max(found) if update is None else update]


def evaluate(run: Path, asked: Evaluation) -> dict[str, Any]:
    """Held-out loss through packs, answers and their metrics; what was found, which is written into the run folder.

    Under torchrun the ranks share the work, and all get the same. Raises UserError, after writing, where a
    user's metric failed.
    """
    own = compose.from_run(run)
    with dist.joined(own.watch.collective_timeout_s) as ranks:
        config, folder = ranks.together(lambda: _what(run, own, asked))
        place = run / runfolder.EVALUATIONS / asked.name(config, folder)
        ranks.require_same("what to evaluate", place.name, letters=120)
        first = ranks.rank == 0
        files = place if asked.has_metrics else run / runfolder.METRIC_FILES
        if asked.has_metrics:
            ranks.together(lambda: metrics.freeze(place, config.evaluate.metrics) if first else None)
        review = ranks.together(lambda: Review.at(config, folder, ranks))
        heldout = review.heldout(config)
        wanted = heldout.metrics(files, config, ranks)
        scored = None
        if config.evaluate.generate:
            scored = outcome.answered(review.model, review.processor, heldout, config, wanted, ranks)
        losses = _losses(review, heldout, config)
    found: dict[str, Any] = {
        "evaluation": place.name,
        "update": int(folder.name.removeprefix("update-")) if folder is not None else 0,
        "base": asked.base,
        "data": str(heldout.path),
        "changes": list(asked.changes),
        "heldout_examples": len(losses),
        "heldout_loss": fmean(losses.values()),
    }
    if scored is not None:
        found |= evaluation.figures(scored) | {"chance": config.evaluate.chance}
        found["predictions"] = str(place / evaluation.PREDICTIONS)
    if first:
        evaluation.write(place, scored, losses, found, None)
    if scored is not None and scored.mistake is not None:
        raise UserError(scored.mistake)
    return found


def _what(run: Path, own: Config, asked: Evaluation) -> tuple[Config, Path | None]:
    """The configuration that was asked for, and the checkpoint's folder. Raises UserError."""
    return asked.config(own), None if asked.base else find_checkpoint(run, asked.update)


def _losses(review: Review, heldout: Heldout, config: Config) -> dict[int, float]:
    """Through packs; the review's model is patched from here on."""
    models.make_ready(review.model, config)
    train, dtype = config.train, models.DTYPES[config.model.dtype]
    root = models.Root(review.model, dtype, train.loss_chunk_rows, heldout.images, train.loss_chunk_words)
    return heldout.losses(root, review.ranks)
