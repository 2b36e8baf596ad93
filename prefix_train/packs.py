"""Rows of token ids -> the packs of a run, for a training loop that is not this package's own.

The rows are what most trainers take: `input_ids` and `labels`. Planning and collating are those of this package's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray

from configs.errors import UserError
from configs.schema import PackConfig
from prefix_train.collate import collate, entry_weights
from prefix_train.packing import EMPTY
from prefix_train.plan import Update, plan_evaluation, plan_run
from prefix_train.render import Example
from prefix_train.tree import build_forest

NO_LOSS = -100
"""What `labels` hold where a token has no loss, as everywhere in transformers."""

COLUMNS = {"input_ids", "labels", "attention_mask"}
"""What a row may hold. A mask says nothing more than that nothing is padded."""

Row = Mapping[str, Any] | Example


class PackInputs(dict[str, Any]):
    """One pack as keywords of a model's forward under `train_packs`: `model(**pack).loss`.

    input_ids: [1, T]. position_ids: [1, T], or [3, 1, T] with images. layout: the forest of its segments. targets: the
    tokens that have a loss, with their weights. use_cache: False. With images also pixel_values and image_grid_thw.
    """

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackInputs:
        """The same pack on `device`."""
        moved = PackInputs(self)
        for name, value in self.items():
            if hasattr(value, "to"):
                moved[name] = value.to(device, non_blocking=non_blocking)
        return moved


class PackTargets:
    """What a pack's loss needs, as `collate.Targets`: rows, ids and weights, [M] each. A plain class, since FSDP2
    rebuilds others among a forward's keywords."""

    __slots__ = ("ids", "rows", "weights")

    def __init__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.rows, self.ids, self.weights = rows, ids, weights

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackTargets:
        """The same targets on `device`."""
        return PackTargets(
            *(each.to(device, non_blocking=non_blocking) for each in (self.rows, self.ids, self.weights))
        )


class Packs(Sequence[PackInputs]):
    """The packs of a run, in the order in which ranks take them in turn: a dataset that must not be shuffled.

    ranks: how many take them. per_rank: packs that each of them has in one update, the same in every update (an empty
    pack, which has no loss, where an update needs fewer). The loss of an update is the mean of its packs' losses, over
    all ranks: what gradient accumulation and data parallelism compute anyway. `updates` are what is trained together.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        updates: Sequence[Update],
        ranks: int,
        weighting: Literal["example", "token"],
        per_rank: int = 0,
    ) -> None:
        """per_rank: at least so many."""
        self.ranks = ranks
        self.per_rank = max(per_rank, *(len(rank) for update in updates for rank in update))
        self._examples, self._updates, self._weighting = examples, updates, weighting
        self._targets = [int(example.target.sum()) for example in examples]

    @property
    def per_update(self) -> int:
        """Packs of one update, over all ranks: what a sum of their losses is to be divided by."""
        return self.ranks * self.per_rank

    def __len__(self) -> int:
        """Packs of the whole run, over all ranks."""
        return len(self._updates) * self.per_update

    @overload
    def __getitem__(self, index: int) -> PackInputs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PackInputs]: ...

    def __getitem__(self, index: int | slice) -> PackInputs | Sequence[PackInputs]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number, place = divmod(range(len(self))[index], self.per_update)
        turn, rank = divmod(place, self.ranks)
        return self._collate(self._updates[number], rank, turn)

    @property
    def members(self) -> list[list[int]]:
        """For each update the rows that are trained together."""
        return [[member for pack in chain.from_iterable(update) for member in pack.members] for update in self._updates]

    def updates(self, rank: int = 0) -> Iterator[list[PackInputs]]:
        """For each update the packs of `rank`."""
        for update in self._updates:
            yield [self._collate(update, rank, turn) for turn in range(self.per_rank)]

    @property
    def positions(self) -> int:
        """Tokens that the run computes."""
        return sum(pack.positions for update in self._updates for rank in update for pack in rank)

    @property
    def logical(self) -> int:
        """Tokens that it would compute if each example stood alone."""
        return sum(pack.logical for update in self._updates for rank in update for pack in rank)

    def _collate(self, update: Update, rank: int, turn: int) -> PackInputs:
        counts = [self._targets[member] for pack in chain.from_iterable(update) for member in pack.members]
        weights = entry_weights(self._weighting, counts)
        pack = update[rank][turn] if turn < len(update[rank]) else EMPTY
        batch = collate(pack, self._examples, weights, torch.float64)
        targets = PackTargets(batch.targets.rows, batch.targets.ids, batch.targets.weights * self.per_update)
        inputs = PackInputs(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            layout=batch.layout,
            targets=targets,
            use_cache=False,
        )
        if batch.pixel_values is not None:
            inputs |= {"pixel_values": batch.pixel_values, "image_grid_thw": batch.image_grid_thw}
        return inputs


def pack_examples(
    rows: Sequence[Row],
    *,
    max_positions: int,
    packs_per_update: int | None = None,
    examples_per_update: int | None = None,
    epochs: float = 1,
    ranks: int = 1,
    weighting: Literal["example", "token"] = "example",
    min_shared: int = PackConfig.min_shared,
    seed: int = 0,
) -> Packs:
    """The packs of a run over `rows`, every example once in each of `epochs`, other examples meeting in each.

    rows: mappings with `input_ids` [L] and `labels` [L], the ids again where a token has a loss and -100 elsewhere, not
    shifted; or the examples that `prefix_train.data.load_examples` returns. max_positions: most tokens of one pack.
    packs_per_update (over all ranks, a multiple of them) or examples_per_update: what is trained together. weighting:
    does every example of an update weigh the same, or every target token? min_shared, seed: as in `configs.schema`.
    Raises UserError, naming the row, for what cannot be trained exactly.
    """
    examples = examples_of_rows(rows)
    pack = PackConfig(
        max_positions=max_positions,
        min_shared=min_shared,
        packs_per_update=packs_per_update,
        examples_per_update=examples_per_update,
    )
    forest = build_forest((example.keys for example in examples), min_shared)
    sources = [example.source for example in examples]
    run = plan_run(forest.lengths, forest, pack, ranks, seed, epochs=epochs, sources=sources)
    return Packs(examples, [step.update for step in run.walk()], ranks, weighting, (packs_per_update or 0) // ranks)


def pack_heldout(
    rows: Sequence[Row],
    *,
    max_positions: int,
    ranks: int = 1,
    weighting: Literal["example", "token"] = "example",
    min_shared: int = PackConfig.min_shared,
) -> Packs:
    """The packs of examples that are only looked at: one update with all of them, whose loss is the mean of its packs'.

    Arguments and errors as `pack_examples`.
    """
    examples = examples_of_rows(rows)
    pack = PackConfig(max_positions=max_positions, min_shared=min_shared)
    forest = build_forest((example.keys for example in examples), min_shared)
    sources = [example.source for example in examples]
    plan = plan_evaluation(forest.lengths, forest, pack, ranks, sources=sources)
    return Packs(examples, plan.updates, ranks, weighting)


def collate_packs(items: Sequence[PackInputs]) -> PackInputs:
    """The collator of a data loader over `Packs`, whose batches hold one pack. Raises UserError for more."""
    if len(items) != 1:
        raise UserError(f"a batch of {len(items)} packs: a pack is a batch already; write batch_size=1")
    return items[0]


def examples_of_rows(rows: Sequence[Row]) -> list[Example]:
    """`rows` as examples. Raises UserError for the first that cannot be trained exactly."""
    if not len(rows):
        raise UserError("there are no rows to pack")
    return [row if isinstance(row, Example) else _example(row, f"row {number}") for number, row in enumerate(rows)]


def _example(row: Mapping[str, Any], source: str) -> Example:
    if strange := row.keys() - COLUMNS:
        raise UserError(
            f"{source}: {', '.join(sorted(strange))}: a row has input_ids and labels; remove other columns (examples "
            "with images: prefix_train.data.load_examples)"
        )
    ids, labels = _integers(row, "input_ids", source), _integers(row, "labels", source)
    if len(ids) != len(labels):
        raise UserError(f"{source}: {len(ids)} input_ids, but {len(labels)} labels")
    if not np.asarray(row.get("attention_mask", 1)).all():
        raise UserError(f"{source}: attention_mask holds zeros: a pack has no padding; leave padded tokens out")
    target = labels != NO_LOSS
    if wrong := np.flatnonzero(target & (labels != ids)).tolist():
        place = wrong[0]
        raise UserError(
            f"{source}: labels[{place}] is {labels[place]}, input_ids[{place}] is {ids[place]}: labels are the ids "
            f"themselves, not shifted, or {NO_LOSS}"
        )
    if not target.any():
        raise UserError(f"{source}: no label besides {NO_LOSS}: nothing is to be learned from it; leave the row out")
    if target[0]:
        raise UserError(f"{source}: its first token has a label, but nothing stands before it; write {NO_LOSS} there")
    first = int(np.argmax(target))
    return Example(source, source, ids, ids, np.arange(len(ids))[None], target, (), "", first)


def _integers(row: Mapping[str, Any], name: str, source: str) -> NDArray[np.int64]:
    if name not in row:
        raise UserError(f"{source}: no {name}: a row has input_ids and labels")
    found = np.asarray(row[name])
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise UserError(f"{source}: {name} is {found.dtype} of shape {found.shape}; one row of integers is wanted")
    return found.astype(np.int64)
