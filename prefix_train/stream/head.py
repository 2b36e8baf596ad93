"""The two ends of the model: embedding rows gathered on the host, and the head, which passes by in tiles of words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train.loss import word_tiles
from prefix_train.stream.manifest import BlockFile, Stored
from prefix_train.stream.ring import Ring, Source, Unit
from prefix_train.stream.store import Store, unpack

SLOTS = 2
"""Tiles of the head that are on the device at a time: one that is computed with, one that comes."""


class Embedding:
    """In place of an embedding's forward: looks rows up in the mapped file and sends them to the device of the ids."""

    def __init__(self, store: Store) -> None:
        block = store.by_name["embedding"]
        self._rows = unpack(_matrix(block), store.bytes(block))

    def __call__(self, ids: Tensor) -> Tensor:
        """[..., D] for ids of any shape."""
        found = self._rows[ids.to("cpu").reshape(-1)]
        return found.to(ids.device).view(*ids.shape, -1)


class Head:
    """The head's tiles of `chunk_words` rows (0: all of them), read once for each way past the prediction rows."""

    def __init__(self, source: Source, chunk_words: int) -> None:
        block = source.store.by_name["head"]
        self.stored = _matrix(block)
        words, width = self.stored.shape
        row = width * self.stored.dtype.itemsize
        data = self.stored.parts["data"]
        self._tiles = word_tiles(words, chunk_words)
        units = [Unit(block, data.offset + first * row, (end - first) * row) for first, end in self._tiles]
        self.ring = Ring(source, units, min(SLOTS, len(units)))

    def begin(self, ways: int) -> None:
        """Begin to read: the head will pass by so many times."""
        places = list(range(len(self._tiles)))
        self.ring.begin(places * ways, places)

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Each tile's first word, and its rows [v, D] on the device until the next is asked for."""
        for place, (first, end) in enumerate(self._tiles):
            with self.ring.visit(place) as memory:
                yield first, memory.view(self.stored.dtype).view(end - first, -1)


def _matrix(block: BlockFile) -> Stored:
    """The block's only tensor, as it is computed with."""
    if len(block.tensors) != 1 or block.tensors[0].weights != "plain" or len(block.tensors[0].shape) != 2:
        names = ", ".join(stored.name for stored in block.tensors)
        raise UserError(f"{block.name} holds {names or 'nothing'}: one matrix that is not quantised is expected")
    return block.tensors[0]


def dtype_of(store: Store) -> torch.dtype:
    """What the model computes in."""
    return store.manifest.dtype
