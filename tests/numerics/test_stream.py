"""Frozen weights that pass through block by block: the same gradients as where they stay, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import batches, streaming

COUNT = 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("weights", ["plain", "nf4"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3", "llama"])
def test_gradients_are_equal_to_the_bit(family: str, weights: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = streaming.built(family, dtype)
    store = streaming.stored(made, tmp_path / "store", weights)
    both = streaming.pair(made, store, streaming.options(dtype))
    packs = batches.batches(batches.make(made, COUNT), [[0, 1, 2, 3], [4], [5, 6]])
    mine, theirs = streaming.updated(both, packs)
    assert streaming.unlike(streaming.gradient(both.stream), streaming.gradient(both.whole)) == []
    assert mine == theirs
