"""Random examples that share beginnings, grouped into packs at will; and the same examples for the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.images import ImageRef
from prefix_train.packing import EMPTY, Pack, Packer, pack_of
from prefix_train.render import Example, PositionIndex
from prefix_train.tree import build_forest
from tests import models, oracle

GRIDS = ((1, 2, 2), (1, 4, 2), (1, 4, 6))
"""Images in patches: 1, 2 and 6 tokens."""


class Pixels:
    """Stands for an ImageStore: pixels of an image, drawn from its digest."""

    def load(self, path: Path, digest: str) -> np.ndarray:
        grid = GRIDS[int(digest, 16) % len(GRIDS)]
        draw = np.random.default_rng(int(digest, 16))
        return draw.standard_normal((grid[0] * grid[1] * grid[2], models.PATCH_VALUES)).astype(np.float32)


class Maker:
    """Makes examples of one model's vocabulary."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.positions = PositionIndex(model.config)
        self.draw = np.random.default_rng(seed)
        self.store = Pixels()

    def words(self, count: int) -> list[int]:
        return self.draw.integers(0, models.IMAGE, count).tolist()

    def image(self) -> list[int]:
        """An image's span, its number hidden in the padding of the list: [start, placeholders..., end]."""
        number = int(self.draw.integers(1, 1 << 20))
        tokens = np.prod(GRIDS[number % len(GRIDS)]) // 4
        return [models.VISION_START, *[-number] * int(tokens), models.VISION_END]

    def example(self, index: int, spans: Sequence[Sequence[int]], targets: int) -> Example:
        """spans: tokens, an image's placeholders as minus its number; the last `targets` tokens are the target."""
        keys = np.array([token for span in spans for token in span])
        ids = np.where(keys < 0, models.IMAGE, keys)
        images = []
        for number in dict.fromkeys(-keys[keys < 0]):
            (places,) = np.nonzero(keys == -number)
            grid = GRIDS[number % len(GRIDS)]
            images.append(
                ImageRef(int(places[0]), len(places), grid, f"{number:x}", Path(f"{number}.png"), self.store)  # type: ignore[arg-type]
            )
        target = np.arange(len(ids)) >= len(ids) - targets
        position_ids = self.positions(ids, [image.grid for image in images])
        return Example(
            id=f"e{index}",
            source=f"data.jsonl:{index + 1}",
            ids=ids,
            keys=keys,
            position_ids=np.ascontiguousarray(position_ids),
            target=target,
            images=tuple(images),
            answer="",
            prompt_length=len(ids) - targets,
        )


def make(model: PreTrainedModel, count: int, seed: int = 0, images: bool = False) -> list[Example]:
    """`count` examples under two roots of 19 and 8 tokens, some with a second shared segment, all of other lengths.

    images: one in the first root and one in every third example's own part; else none.
    """
    maker = Maker(model, seed)
    shared_image = maker.image() if images else []
    roots = [[maker.words(7), shared_image, maker.words(12)], [maker.words(8)]]
    middles = [[maker.words(5)], [], [maker.words(6)]]
    examples = []
    for index in range(count):
        own_image = maker.image() if images and index % 3 == 0 else []
        tail = maker.words(int(maker.draw.integers(3, 9)))
        spans = [*roots[index % 2], *middles[index % 3], own_image, tail]
        examples.append(maker.example(index, spans, targets=int(maker.draw.integers(1, len(tail) + 1))))
    return examples


def pack(examples: Sequence[Example], members: Sequence[int], min_shared: int = 4) -> Pack:
    """One pack with `members`; none: the empty pack."""
    if not members:
        return EMPTY
    forest = build_forest([example.keys for example in examples], min_shared)
    packer = Packer(forest, min_shared)
    (roots,) = packer.pack(packer.select(members), 1 << 30, range(len(examples)))
    return pack_of(roots, forest.lengths.tolist())


def batches(
    examples: Sequence[Example],
    groups: Sequence[Sequence[int]],
    weighting: Literal["example", "token"] = "example",
    dtype: torch.dtype = torch.float32,
) -> list[Batch]:
    """A pack for each group of examples; together they are one update."""
    counts = [int(examples[member].target.sum()) for group in groups for member in group]
    weights = entry_weights(weighting, counts)
    return [collate(pack(examples, group), examples, weights, dtype) for group in groups]


def alone(
    examples: Sequence[Example], weighting: Literal["example", "token"] = "example", dtype: torch.dtype = torch.float64
) -> list[oracle.Example]:
    """The same update for `oracle.run`."""
    total = sum(int(example.target.sum()) for example in examples)
    found = []
    for example in examples:
        (targets,) = np.nonzero(example.target)
        share = 1 / len(examples) / len(targets) if weighting == "example" else 1 / total
        pixels = [torch.from_numpy(image.load()).to(dtype) for image in example.images]
        found.append(
            oracle.Example(
                torch.from_numpy(example.ids),
                torch.from_numpy(targets),
                torch.full((len(targets),), share, dtype=torch.float64),
                torch.cat(pixels) if pixels else None,
                torch.tensor([image.grid for image in example.images]) if pixels else None,
            )
        )
    return found


def regroup(count: int, packs: int, seed: int) -> list[list[int]]:
    """`count` examples dealt at random into `packs` groups, some possibly empty."""
    draw = np.random.default_rng(seed)
    owners = draw.integers(0, packs, count)
    return [np.flatnonzero(owners == group).tolist() for group in range(packs)]
