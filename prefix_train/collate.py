"""Pack plan + examples -> one CPU batch: ids, position ids, pixels, layout and the table of targets.

T positions of the pack, M target rows, E (example, target token) entries, N images, P patches of D values.
Everything is copied from the standalone examples, segment by segment; nothing is computed from the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefix_train.images import ImageRef
from prefix_train.layout import Layout
from prefix_train.render import Example

if TYPE_CHECKING:
    from prefix_train.packing import Pack

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EntryWeights:
    """Weights of target tokens, fixed before the forward. Counts are over all packs, accumulation and ranks."""

    weighting: Literal["example", "token"]
    examples: int
    target_tokens: int

    def of(self, targets: int) -> float:
        """Weight of each target token of an example that has `targets` of them."""
        return 1 / self.examples / targets if self.weighting == "example" else 1 / self.target_tokens


def entry_weights(weighting: Literal["example", "token"], target_counts: Sequence[int]) -> EntryWeights:
    """The weights of an update whose examples, on all ranks together, have `target_counts` target tokens.

    `example`: 1 / examples / (target tokens of the example). `token`: 1 / target tokens. Raises ValueError where there
    is nothing to train.
    """
    if not target_counts or min(target_counts) < 1:
        raise ValueError("an update needs examples, each with at least one target token")
    return EntryWeights(weighting, len(target_counts), sum(target_counts))


class Targets:
    """What the loss needs. A plain class: FSDP2 rebuilds dataclasses and named tuples.

    rows: [M] int64, buffer positions whose hidden states predict. ids: [M] int64, the tokens to predict; (row, id)
    pairs are unique, sorted by row. weights: [M] float, summed over the examples that share a target. Entries, one for
    each target token of each member: entry_example [E] int64 into the pack's members, entry_target [E] int64 into rows.
    """

    __slots__ = ("entry_example", "entry_target", "ids", "rows", "weights")

    def __init__(self, rows: Tensor, ids: Tensor, weights: Tensor, entry_example: Tensor, entry_target: Tensor) -> None:
        self.rows, self.ids, self.weights = rows, ids, weights
        self.entry_example, self.entry_target = entry_example, entry_target

    def __len__(self) -> int:
        return self.rows.numel()


class Batch:
    """One pack as tensors. A plain class: FSDP2 rebuilds dataclasses and named tuples.

    input_ids: [1, T] int64. position_ids: [3, 1, T] int64 for M-RoPE models, else [1, T]. pixel_values: [P, D] float32
    or None, images in buffer order, each once. image_grid_thw: [N, 3] int64 or None; grids: the same as integers on the
    host. positions, logical: tokens in the buffer, and of all members alone; both 0 for a pack without members, whose
    buffer holds one token and no target. members: indices of the examples.
    """

    __slots__ = (
        "grids",
        "image_grid_thw",
        "input_ids",
        "layout",
        "logical",
        "members",
        "pixel_values",
        "position_ids",
        "positions",
        "targets",
    )

    input_ids: Tensor
    position_ids: Tensor
    layout: Layout
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    grids: tuple[tuple[int, int, int], ...]
    targets: Targets
    positions: int
    logical: int
    members: tuple[int, ...]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`: one transfer for all indices, one each for layout, weights and pixels."""
        if torch.device(device) == self.input_ids.device:
            return self
        old = self.targets
        tables = [self.input_ids, self.position_ids, old.rows, old.ids, old.entry_example, old.entry_target]
        tables += [] if self.image_grid_thw is None else [self.image_grid_thw]
        flat = _send(torch.cat([table.reshape(-1) for table in tables]), device)
        pieces = torch.split(flat, [table.numel() for table in tables])
        moved = [piece.view(table.shape) for piece, table in zip(pieces, tables, strict=True)]
        copy = Batch()
        copy.input_ids, copy.position_ids = moved[0], moved[1]
        copy.targets = Targets(moved[2], moved[3], _send(old.weights, device), moved[4], moved[5])
        copy.image_grid_thw = None if self.image_grid_thw is None else moved[6]
        copy.pixel_values = None if self.pixel_values is None else _send(self.pixel_values, device)
        copy.layout = self.layout.to(device, non_blocking=True)
        copy.grids, copy.positions, copy.logical, copy.members = self.grids, self.positions, self.logical, self.members
        return copy


def collate(
    pack: Pack, examples: Sequence[Example], weights: EntryWeights, dtype: torch.dtype = torch.float32
) -> Batch:
    """The batch of `pack` on the CPU. dtype: of the target weights.

    Raises ValueError where the plan does not fit the examples: members of a segment that differ in ids, images or
    position ids, an image cut by a segment's boundary, a target that nothing predicts; UserError for a changed image.
    """
    batch = Batch()
    batch.members = tuple(pack.members)
    if not pack.members:
        return _fill_empty(batch, examples, dtype)
    needed = {*pack.members, *(example for example, _ in pack.origin)}
    alone = {index: examples[index] for index in needed}
    places = _places(pack, alone)
    batch.layout = Layout.from_tree(pack.lengths, pack.parents)
    pieces = [
        (alone[example], start, start + length)
        for (example, start), length in zip(pack.origin, pack.lengths, strict=True)
    ]
    batch.input_ids = torch.from_numpy(np.concatenate([example.ids[a:b] for example, a, b in pieces]))[None]
    batch.position_ids = position_ids(pieces)
    images = [image for example, a, b in pieces for image in _images_within(example, a, b)]
    batch.grids = tuple(image.grid for image in images)
    batch.pixel_values = torch.from_numpy(np.concatenate([image.load() for image in images])) if images else None
    batch.image_grid_thw = torch.tensor(batch.grids, dtype=torch.int64, device="cpu") if images else None
    batch.targets = _targets(places, [alone[member] for member in pack.members], weights, dtype)
    batch.positions = batch.layout.total
    batch.logical = sum(len(place) for place in places)
    return batch


def position_ids(pieces: Sequence[tuple[Example, int, int]]) -> Tensor:
    """[3, 1, T] or [1, T]: of tokens [start, end) of each piece's example, as they are when it stands alone."""
    ids = torch.from_numpy(
        np.concatenate([example.position_ids[:, start:end] for example, start, end in pieces], axis=1)
    )
    return ids[:, None] if len(ids) == 3 else ids


def target_tokens(example: Example) -> Index:
    """Which of an example's tokens have a loss. Raises ValueError where there is none or nothing predicts the first."""
    targets = np.flatnonzero(example.target)
    if not targets.size or targets[0] == 0:
        raise ValueError(f"{example.source}: no target, or one that no token stands before")
    return targets


def prediction_rows(place: Index, targets: Index) -> Index:
    """Buffer rows that predict the tokens `targets` of an example whose token i lies at `place[i]`: on its own path.

    The token before the first one of a segment is the last of the parent's, wherever in the buffer that lies.
    """
    return place[targets - 1]


def _places(pack: Pack, examples: Mapping[int, Example]) -> list[Index]:
    """Buffer position of each token of each member, after checking that the buffer holds just those tokens."""
    starts = np.cumsum([0, *pack.lengths])
    places = []
    for member, path in zip(pack.members, pack.paths, strict=True):
        example = examples[member]
        if [-1, *path[:-1]] != [pack.parents[segment] for segment in path]:
            raise ValueError(f"{example.source}: its segments {path} are no path from a root")
        offset = 0
        for segment in path:
            _check_same(examples[pack.origin[segment][0]], pack.origin[segment][1], example, offset, segment, pack)
            offset += pack.lengths[segment]
        if offset != len(example.ids):
            raise ValueError(f"{example.source}: its segments hold {offset} tokens, the example {len(example.ids)}")
        places.append(np.concatenate([np.arange(starts[segment], starts[segment + 1]) for segment in path]))
    if unused := set(range(len(pack.lengths))).difference(*pack.paths):
        raise ValueError(f"no member of the pack uses its segments {sorted(unused)}")
    return places


def _check_same(origin: Example, start: int, example: Example, offset: int, segment: int, pack: Pack) -> None:
    """Raise ValueError where the segment's tokens, copied from `origin`, are not those of `example` at `offset`."""
    if origin is example and start == offset:
        return
    length = pack.lengths[segment]
    theirs, ours = slice(start, start + length), slice(offset, offset + length)
    where = f"{example.source} and {origin.source} share segment {segment} but differ in"
    if not np.array_equal(origin.ids[theirs], example.ids[ours]):
        raise ValueError(f"{where} token ids")
    if not np.array_equal(origin.position_ids[:, theirs], example.position_ids[:, ours]):
        raise ValueError(f"{where} position ids")
    images = [(image.start - start, image.digest) for image in _images_within(origin, start, start + length)]
    if images != [(image.start - offset, image.digest) for image in _images_within(example, offset, offset + length)]:
        raise ValueError(f"{where} images")
    if not np.array_equal(origin.keys[theirs], example.keys[ours]):
        raise ValueError(f"{where} keys")


def _images_within(example: Example, start: int, end: int) -> list[ImageRef]:
    images = [image for image in example.images if image.start < end and start < image.start + image.length]
    for image in images:
        if image.start < start or image.start + image.length > end:
            raise ValueError(f"{example.source}: a segment's boundary cuts the image {image.path}")
    return images


def _targets(places: list[Index], members: list[Example], weights: EntryWeights, dtype: torch.dtype) -> Targets:
    rows, ids, owners, shares = [], [], [], []
    for index, (place, example) in enumerate(zip(places, members, strict=True)):
        targets = target_tokens(example)
        rows.append(prediction_rows(place, targets))
        ids.append(example.ids[targets])
        owners.append(np.full(len(targets), index))
        shares.append(np.full(len(targets), weights.of(len(targets))))
    token_ids = np.concatenate(ids)
    base = int(token_ids.max()) + 1
    pairs, entry_target = np.unique(np.concatenate(rows) * base + token_ids, return_inverse=True)
    sums = np.bincount(entry_target, weights=np.concatenate(shares))
    return Targets(
        rows=torch.from_numpy(pairs // base),
        ids=torch.from_numpy(pairs % base),
        weights=torch.from_numpy(sums).to(dtype),
        entry_example=torch.from_numpy(np.concatenate(owners)),
        entry_target=torch.from_numpy(entry_target),
    )


def _fill_empty(batch: Batch, examples: Sequence[Example], dtype: torch.dtype) -> Batch:
    """One text token, so that the model runs and issues its collectives, and nothing that has a loss."""
    some = examples[0]
    token = int(some.ids[np.argmax(some.keys >= 0)])
    batch.input_ids = torch.tensor([[token]], device="cpu")
    zeros = torch.zeros(len(some.position_ids), 1, dtype=torch.int64, device="cpu")
    batch.position_ids = zeros[:, None] if len(zeros) == 3 else zeros
    batch.layout = Layout.from_tree([1], [-1])
    batch.pixel_values, batch.image_grid_thw, batch.grids = None, None, ()
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    batch.targets = Targets(none, none, none.to(dtype), none, none)
    batch.positions, batch.logical = 0, 0
    return batch


def _send(tensor: Tensor, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
