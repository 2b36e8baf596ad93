"""From data and plan to this rank's batches; what goes wrong with an example is agreed on by all ranks first.

All ranks read all the data, make the same plan and compare both. A rank alone can still meet a bad example (its node
sees another state of the file system, an image changes during the run): it says so before the update's first pack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from configs.errors import UserError
from configs.schema import Config
from prefix_train.budget import Shape
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.data import Examples, load_examples
from prefix_train.dist import Ranks
from prefix_train.lengths import longest_accepted
from prefix_train.packing import EMPTY, Pack, Packer, pack_of
from prefix_train.plan import Cursor, Step, Update, plan_training
from prefix_train.render import Example, Renderer
from prefix_train.tree import build_forest


def load_agreed(path: Path, renderer: Renderer, config: Config, ranks: Ranks) -> Examples:
    """The examples of `path`, the same on every rank.

    With `data.on_bad_example: skip` a row that any rank cannot read is left out by all. Raises UserError on every
    rank where one may not go on.
    """
    most = longest_accepted(config)
    found = ranks.together(lambda: load_examples(path, renderer, most, config.data.on_bad_example))
    if not ranks.any(bool(found.skipped)):
        return found
    mine = [example.source for example in found]
    everywhere = set(mine).intersection(*ranks.gather(mine))
    skipped = sorted(set(chain.from_iterable(ranks.gather(found.skipped))))
    if not everywhere:
        raise UserError(f"{path}: no example can be read by every rank: {skipped[0]}")
    if len(everywhere) == len(mine):
        return Examples(found, skipped)
    return Examples([found[place] for place, source in enumerate(mine) if source in everywhere], skipped)


@dataclass(frozen=True)
class Ready:
    """One update, ready to run. batches: this rank's. skipped: one line for each example left out, by all ranks."""

    step: Step
    batches: list[Batch]
    skipped: list[str]


def shape_of(pack: Pack, targets: Sequence[int]) -> Shape:
    """What memory depends on of `pack`. targets: of every example; at least as many as rows go through the head."""
    return Shape.of(pack.lengths, pack.parents, sum(targets[member] for member in pack.members))


class Feed:
    """The updates of a run, each with this rank's batches, which are made while the update before runs."""

    def __init__(self, config: Config, examples: Sequence[Example], ranks: Ranks) -> None:
        self._examples, self._ranks, self._config = examples, ranks, config
        self._targets: list[int] = []
        self._names: list[str] = []
        self._content = hashlib.sha256()
        self.images = False
        """Has any example an image?"""
        forest = build_forest((self._look(example).keys for example in examples), config.pack.min_shared)
        # Sharing every token that can be shared: what is left of a pack is never larger than the pack was.
        self._packer, self._lengths = Packer(forest, min_shared=1), forest.lengths.tolist()
        self.plan = plan_training(config, forest, ranks.world, self._names)
        self.digest = self._content.hexdigest()
        """SHA-256 of all examples: their tokens, pixels and targets, which a plan knows the lengths of alone."""
        ranks.require_same("the examples", self.digest)

    def largest_pack(self) -> Shape:
        """Of the first epoch's packs the one with the most positions."""
        packs = (pack for pack in self.plan.epoch(0).packs if pack.members)
        return shape_of(max(packs, key=lambda pack: (pack.positions, pack.pairs)), self._targets)

    def name(self, example: int) -> str:
        """What to call an example in an error: its `file:line`."""
        return self._names[example]

    def walk(self, start: Cursor) -> Iterator[Ready]:
        """The updates from `start` on. Raises UserError on every rank for an example that one of them cannot read."""
        epoch = -1
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            steps = self.plan.walk(start)
            made = [(step, pool.submit(self._make, step.update)) for step in [next(steps, None)] if step]
            while made:
                step, batches = made.pop()
                if step.cursor.epoch != epoch:
                    epoch = step.cursor.epoch
                    self._ranks.require_same(f"the plan of epoch {epoch}", step.plan.digest)
                ready = self._agree(step, batches.result())
                made = [(step, pool.submit(self._make, step.update)) for step in [next(steps, None)] if step]
                yield ready

    def without(self, update: Update, bad: Collection[int]) -> Update:
        """`update` without these examples: the same packs, each with what is left of it, empty where nothing is."""
        return tuple(tuple(self._left_of(pack, bad) for pack in rank) for rank in update)

    def _look(self, example: Example) -> Example:
        self._targets.append(int(example.target.sum()))
        self._names.append(example.source)
        self.images |= bool(example.images)
        for table in (example.keys, example.target):
            self._content.update(len(table).to_bytes(8, "little") + table.tobytes())
        return example

    def _make(self, update: Update) -> list[Batch] | dict[int, str]:
        """This rank's batches, weighted over all examples of the update; or which examples cannot be read, and why."""
        counts = [self._targets[member] for rank in update for pack in rank for member in pack.members]
        weights = entry_weights(self._config.train.weighting, counts)
        try:
            return [collate(pack, self._examples, weights) for pack in update[self._ranks.rank]]
        except UserError:
            unreadable = self._unreadable(update[self._ranks.rank])
            if not unreadable:
                raise
            return unreadable

    def _unreadable(self, packs: Sequence[Pack]) -> dict[int, str]:
        found = {}
        for member in chain.from_iterable(pack.members for pack in packs):
            try:
                for image in self._examples[member].images:
                    image.load()
            except UserError as error:
                text, name = str(error), self.name(member)
                found[member] = text if text.startswith(f"{name}: ") else f"{name}: {text}"
        return found

    def _agree(self, step: Step, made: list[Batch] | dict[int, str]) -> Ready:
        skipped: dict[int, str] = {}
        while self._ranks.any(isinstance(made, dict)):
            mine = list(made.items()) if isinstance(made, dict) else []
            told = dict(chain.from_iterable(self._ranks.gather(mine)))
            if self._config.data.on_bad_example == "stop":
                raise UserError(told[min(told)])
            skipped |= told
            left = self.without(step.update, skipped)
            if not any(pack.members for rank in left for pack in rank):
                raise UserError(f"update {step.cursor.number}: none of its examples can be read: {told[min(told)]}")
            made = self._make(left)
        assert isinstance(made, list)
        return Ready(step, made, [skipped[member] for member in sorted(skipped)])

    def _left_of(self, pack: Pack, bad: Collection[int]) -> Pack:
        members = [member for member in pack.members if member not in bad]
        if len(members) == len(pack.members):
            return pack
        if not members:
            return EMPTY
        unbounded = sum(self._lengths[member] for member in members)
        packed = self._packer.pack(self._packer.select(members), unbounded, range(len(self._lengths)))
        return pack_of(list(chain.from_iterable(packed)), self._lengths)
