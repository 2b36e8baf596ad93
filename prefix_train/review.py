"""A run folder looked at again, after the run: verify, evaluate, export. One process, from the newest checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import Config
from prefix_train import anatomy, checkpoint, engines, export, outcome
from prefix_train import model as models
from prefix_train.dist import Ranks
from prefix_train.heldout import Heldout
from prefix_train.render import Renderer


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
        config = compose.from_run(run)
        folder = checkpoint.latest(run)
        if folder is None:
            raise UserError(f"{run} has no checkpoint yet: nothing has been trained that could be looked at")
        torch.set_num_threads(config.train.threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        skeleton, _ = engines.load(config)
        trained = export.from_checkpoint(folder, models.adapt(skeleton, config))
        model, processor = outcome.restore(config, trained, device)
        return cls(config, trained, model, processor, Ranks(0, 1, device, None))

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


def evaluate(run: Path, data: Path | None) -> dict[str, Any]:
    """Held-out loss through packs and accuracy by generating. data: another file than the run's own."""
    review = Review.of(run)
    config = review.config
    if data is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, heldout=str(data)))
    heldout = review.heldout(config)
    answered = outcome.answered(review.model, review.processor, heldout, config)
    models.make_ready(review.model, config)
    train, dtype = config.train, models.DTYPES[config.model.dtype]
    root = models.Root(review.model, dtype, train.loss_chunk_rows, heldout.images, train.loss_chunk_words)
    losses = heldout.losses(root, review.ranks)
    return answered | {"heldout_examples": len(losses), "heldout_loss": sum(losses.values()) / len(losses)}


def export_run(run: Path, folder: Path | None) -> dict[str, Any]:
    """Write the adapter (PEFT's format) or the whole model (transformers') of a run; into the run folder by default."""
    review = Review.of(run)
    name = runfolder.ADAPTER if review.config.train.trainable == "adapter" else runfolder.WEIGHTS
    written = export.export(review.model, review.processor, review.trained, folder or run / name)
    return asdict(written) | {"folder": str(written.folder)}
