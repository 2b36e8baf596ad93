"""Blocks that pass through a GPU: gradients of the resident engine, while files are read, copied and computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_train import anatomy, gradients, model, step
from prefix_train.dist import Ranks
from prefix_train.stream import ring
from prefix_train.stream.engine import Streamed, prepare
from tests import batches, streaming

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COUNT = 7


def trainer(root: model.Root) -> step.Stepper:
    parameters = anatomy.trainable(root.model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_B" in name:
                draw = torch.Generator().manual_seed(len(name))
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.1, generator=draw))
    coverage = gradients.Coverage(list(parameters), frozenset(), warmup=99)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    return step.Stepper(root, parameters, optimizer, Ranks(0, 1, torch.device("cuda"), None), coverage, 0, 1.0)


@pytest.mark.parametrize("weights", ["plain", "nf4"])
@pytest.mark.parametrize(("host", "offload"), [("files", "none"), ("files", "auto"), ("pinned", "none")])
@pytest.mark.parametrize("together", [1, 3])
def test_gradients_are_the_resident_engine_s(
    weights: Any, host: str, offload: str, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "PIECE", 4096)
    made = streaming.built("qwen3", torch.bfloat16)
    store = streaming.stored(made, tmp_path / "store", weights)
    config = streaming.options(
        torch.bfloat16,
        adapter={"dropout": 0.0},
        memory={"offload": offload},
        pack={"max_positions": 512},
        stream={"host": host, "packs_per_visit": together, "readers": 3},
    )
    given = batches.batches(batches.make(made, COUNT), [[0, 1, 2, 3], [4], [5, 6]])
    device = torch.device("cuda")
    streamed = trainer(Streamed(prepare(streaming.hollow(made, store), config), config, store, device, False, 1))
    train = config.train
    whole = model.Root(
        model.prepare(made, config), torch.bfloat16, train.loss_chunk_rows, False, train.loss_chunk_words
    )
    resident = trainer(whole.to(device))
    for number in range(5):
        for one in (streamed, resident):
            step.update(one, number, 1e-2, given)
        mine, theirs = streaming.gradient(streamed), streaming.gradient(resident)
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-2, atol=1e-4 * float(gradient.abs().max()))
