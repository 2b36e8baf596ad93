"""A run's export and its check, from the newest checkpoint: what `prefix-train export` and `check` do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import Config
from prefix_train import anatomy, checkpoint, export, geometry
from prefix_train import model as models
from prefix_train.dist import Ranks
from prefix_train.exports import check, merge
from prefix_train.exports.merge import Merging
from prefix_train.heldout import Heldout
from prefix_train.render import Renderer
from prefix_train.review import Review


def export_run(run: Path, folder: Path | None = None, merging: Merging | None = None) -> export.Exported:
    """Write what a run has trained, by default into its own folder: `adapter`, `weights`, or `merged`.

    The adapter in PEFT's format; with `merging` the whole model, never in memory whole; where everything was trained
    and `merging` is not given, the whole model in float32. Raises UserError where the disk cannot hold it, or does not
    give what it is made of.
    """
    config, newest = newest_of(run)
    adapter = config.train.trainable == "adapter"
    name = runfolder.MERGED if merging else runfolder.ADAPTER if adapter else runfolder.WEIGHTS
    place = folder or run / name
    with reading(run):
        if merging is not None:
            return merge.export_merged(config, newest, place, merging)
        if adapter:
            model, processor = models.adapt(models.skeleton(config.model), config), None
            trained = export.from_checkpoint(newest, model)
        else:
            review = Review.of(run)
            model, processor, trained = review.model, review.processor, review.trained
        with export.writing(place):
            return export.export(model, processor, trained, place)


def check_export(folder: Path, run: Path, examples: int) -> dict[str, Any]:
    """Load the export in `folder` with others' code alone and compare it with its run; see `check.check`."""
    config, newest = newest_of(run)
    torch.set_num_threads(config.train.threads)
    transformers.logging.set_verbosity_error()
    skeleton = models.adapt(models.skeleton(config.model), config)
    trained = export.from_checkpoint(newest, skeleton)
    own = anatomy.find(skeleton).base.config
    renderer = Renderer(models.load_processor(config.model, own), own, targets=config.data.targets)
    heldout = Heldout.load(config, renderer, Ranks(0, 1, torch.device("cpu"), None))
    if heldout is None:
        raise UserError("data.heldout is not set: there are no examples to compare on")
    return check.check(folder, config, trained, heldout.examples[:examples])


def newest_of(run: Path) -> tuple[Config, Path]:
    """The options of `run` and its newest checkpoint. Raises UserError where there is none, or no model any more."""
    config, folder = compose.from_run(run), checkpoint.latest(run)
    if folder is None:
        raise UserError(f"{run} has no checkpoint yet: nothing has been trained that could be exported")
    geometry.read_config(config.model)
    return config, folder


@contextmanager
def reading(run: Path) -> Iterator[None]:
    """What the disk or transformers will not give is one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{run}: its checkpoint or its model could not be read: {error}") from error
