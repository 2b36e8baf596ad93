"""No layer waits for the device: neither in its forward, nor recomputed, nor in backward, with inputs offloaded too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from configs.schema import ModelConfig
from prefix_train import flash_linear, kernels, unit
from prefix_train.bench import random_examples, star
from prefix_train.collate import Batch, collate, entry_weights
from tests import models
from tests.offloading import Trained, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PREFIX, CONTINUATIONS, LENGTH = 330, 5, 47

SIZES = {"hidden_size": 128, "intermediate_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Head sizes that every kernel takes."""


@pytest.fixture(autouse=True, scope="module")
def pinned() -> None:
    pytest.importorskip("triton")
    if "fla" not in sys.modules or os.environ.get("FLA_CACHE_MODE") == "default":
        print(kernels.use_pins())
    pytest.importorskip("fla")


def hybrid() -> PreTrainedModel:
    torch.manual_seed(0)
    made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**models._HYBRID, **SIZES}))
    models.draw(made)
    return made.to(torch.bfloat16).train()


def new_pack() -> Batch:
    """Always of the same shape, with tables that no kernel has seen."""
    found = random_examples(PREFIX, CONTINUATIONS, LENGTH, models.VOCABULARY, 0)
    return collate(star(found, PREFIX), found, entry_weights("example", [int(one.target.sum()) for one in found]))


@contextmanager
def strictly() -> Iterator[None]:
    """Waiting for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def after_a_first_pack(attention: str, offloaded: str, deltanet: str = "fla") -> Trained:
    """What is compiled or searched for once has been."""
    packs = [new_pack()]
    run = trained(
        hybrid(),
        packs,
        offloaded,
        device="cuda",
        kernels=ModelConfig(attention=attention, deltanet=deltanet, elementwise="liger", heads="torch"),  # type: ignore[arg-type]
        rank=4,
        dropout=0.3,
    )
    for draw in ("0", "1"):
        run.stepper.root(packs[0].to("cuda"), draw=draw).loss.backward()
    torch.cuda.synchronize()
    return run


def forward_and_backward_strictly(run: Trained, patch: pytest.MonkeyPatch) -> int:
    """One new pack; how many forwards of layers ran strictly, recomputations among them. The loss is computed outside:
    it reads its table of rows once per pack."""
    whole, inner = unit.UnitForward.__call__, unit.UnitForward._run
    ran = []

    def called(self: unit.UnitForward, *args: Any, **kwargs: Any) -> Any:
        with strictly():
            return whole(self, *args, **kwargs)

    def counted(self: unit.UnitForward, *args: Any, **kwargs: Any) -> Any:
        assert torch.cuda.get_sync_debug_mode() == 2
        ran.append(self)
        return inner(self, *args, **kwargs)

    patch.setattr(unit.UnitForward, "__call__", called)
    patch.setattr(unit.UnitForward, "_run", counted)
    batch = new_pack().to("cuda")
    torch.cuda.synchronize()
    loss = run.stepper.root(batch, draw="2").loss
    with strictly():
        loss.backward()
    return len(ran)


@pytest.mark.parametrize("offloaded", ["none", "auto"])
@pytest.mark.parametrize(
    ("attention", "deltanet"),
    [("merged", "fla"), ("joined", "fla_segments"), ("flex", "fla_forest")],
    ids=lambda name: name,
)
def test_no_layer_waits_for_the_device(
    attention: str, deltanet: str, offloaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = after_a_first_pack(attention, offloaded, deltanet)
    assert (run.offload is None) == (offloaded == "none")
    assert forward_and_backward_strictly(run, monkeypatch) == 2 * len(run.stepper.root.anatomy.layers)
    if run.offload is not None:
        assert run.offload.pool.used == 0


def test_tables_that_are_not_passed_on_are_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: flash-linear-attention makes its own tables, for which it reads the boundaries."""
    run = after_a_first_pack("merged", "none")
    imported, tables = flash_linear._import, ("chunk_indices", "cu_seqlens_cpu")

    def planted(module: str, name: str) -> Callable[..., Any]:
        function = imported(module, name)
        if name != "chunk_gated_delta_rule":
            return function
        return lambda **given: function(**{key: value for key, value in given.items() if key not in tables})

    monkeypatch.setattr(flash_linear, "_import", planted)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        forward_and_backward_strictly(run, monkeypatch)


def test_a_planted_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = after_a_first_pack("merged", "auto", "fla")
    layer = run.stepper.root.anatomy.layers[0]
    layer.mlp.register_forward_pre_hook(lambda _, args: args[0].sum().item() and None)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        forward_and_backward_strictly(run, monkeypatch)
