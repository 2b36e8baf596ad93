"""A batch on the GPU is the batch that was collated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefix_train.collate import collate, entry_weights
from prefix_train.data import load_examples
from prefix_train.packing import standalone
from tests import chats
from tests.chats import picture, row, text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_batch_keeps_its_values_on_the_way(tmp_path: Path) -> None:
    chats.draw(tmp_path / "a.png", 320, 224)
    path = chats.write(tmp_path / "d.jsonl", [row([picture("a.png"), text("What is it?")]), row()])
    examples = load_examples(path, chats.renderer(), 4096)
    weights = entry_weights("example", [int(example.target.sum()) for example in examples])
    for index, example in enumerate(examples):
        batch = collate(standalone(index, len(example.ids)), examples, weights)
        moved = batch.to("cuda")
        pairs = [(getattr(moved, name), getattr(batch, name)) for name in ("input_ids", "position_ids")]
        pairs += [
            (getattr(moved.targets, name), getattr(batch.targets, name)) for name in type(batch.targets).__slots__
        ]
        pairs += [(moved.pixel_values, batch.pixel_values), (moved.image_grid_thw, batch.image_grid_thw)]
        pairs += [(moved.layout.segment_of, batch.layout.segment_of)]
        for mine, theirs in pairs:
            if theirs is None:
                assert mine is None
            else:
                assert mine.is_cuda
                assert torch.equal(mine.cpu(), theirs)
