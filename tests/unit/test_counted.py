"""Masks that are functions of a seed, a row and a column."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional

from configs.schema import AdapterConfig, Config
from prefix_train import counted, dropout, frozen, outcome
from prefix_train.counted import Draw
from prefix_train.dropout import SeededDropout
from prefix_train.geometry import Geometry
from prefix_train.layer_bytes import adapter_input_bytes
from tests.live_bytes import LiveBytes
from tests.unit.test_geometry import MODELS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (0, 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (0xFFFFFFFF, 0xFFFFFFFF, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ],
)
def test_published_answers_of_philox(counter: int, key: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known answers that its authors publish, for 7 rounds."""
    one = torch.tensor([counter])
    monkeypatch.setattr(torch, "zeros_like", lambda x: x.clone())  # the other half of the counter
    found = counted._philox(one, one, key << 32 | key)
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_a_seed_may_lie_in_memory() -> None:
    seed = 1 << 61 | 12345
    told, held = (counted.keep(Draw(one, 6144, 20000), 70, 37, CPU) for one in (seed, torch.tensor(seed)))
    assert torch.equal(told, held)
    assert not torch.equal(told, counted.keep(Draw(torch.tensor(seed + 1), 6144, 20000), 70, 37, CPU))


def test_a_mask_is_a_function_of_place() -> None:
    whole = counted.keep(Draw(5, 0, 20000), 90, 70, CPU)
    for first, rows, columns in ((0, 90, 70), (33, 20, 70), (64, 26, 9)):
        part = counted.keep(Draw(5, first, 20000), rows, columns, CPU)
        assert torch.equal(part, whole[first : first + rows, :columns])
    for other in (Draw(6, 0, 20000), Draw(5 + (1 << 32), 0, 20000), Draw(5, 1, 20000)):
        share = float((counted.keep(other, 90, 70, CPU) == whole).double().mean())
        assert 0.5 < share < 0.65  # of two independent masks 0.576 agree


@pytest.mark.parametrize("at_once", [1, 70, 71, 699, 6299, 1 << 21])
def test_a_mask_is_the_same_however_much_is_written_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(5, 12, 20000)
    whole = counted._stays(draw, 90, 70, CPU)
    monkeypatch.setattr(counted, "AT_ONCE", at_once)
    assert torch.equal(counted.keep(draw, 90, 70, CPU), whole)
    found = counted.keep(draw, 90, 70, CPU, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, whole.bfloat16())


def test_memory_of_a_mask_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the rows take eight times the mask, and nothing else."""
    monkeypatch.setattr(counted, "AT_ONCE", 1 << 14)
    more = []
    for rows in (256, 2048):
        with LiveBytes() as live:
            counted.keep(Draw(5, 0, 20000), rows, 512, CPU)
        more.append(live.peak - rows * 512)
    assert more[0] == more[1] < 20 << 14
    with LiveBytes() as live:
        counted._stays(Draw(5, 0, 20000), 2048, 512, CPU)
    assert live.peak > 8 * 2048 * 512  # the fault: all at once


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_what_an_adapter_keeps_is_what_is_planned(dtype: torch.dtype, itemsize: int, counted: bool) -> None:
    geometry = Geometry.of(MODELS["qwen3_5, 27B"])
    config = AdapterConfig(rank=8, dropout=0.1, targets=["down_proj"])
    columns = geometry.linears(0)["down_proj"][0]
    drops, x = SeededDropout(0.1, "here", counted), torch.randn(3, columns).to(dtype).requires_grad_()
    drops.draw = "1/2/3"
    a, b = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((8, columns), (16, 8)))
    kept = dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.linear(functional.linear(drops(x), a), b)
    for weight in (a, b):
        del kept[weight.untyped_storage().data_ptr()]
    assert sum(kept.values()) == adapter_input_bytes(geometry, 0, 3, config, itemsize)


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_as_many_stay_as_should(p: float) -> None:
    draw = Draw(1 << 40, 1000, counted.least_of(p))
    found = counted.keep(draw, 2000, 500, CPU).double()
    assert draw.p == pytest.approx(p, abs=2**-17)
    spread = (draw.p * (1 - draw.p) / found.numel()) ** 0.5
    assert abs(float(found.mean()) - (1 - draw.p)) < 5 * spread
    for across, count in ((0, 2000), (1, 500)):
        means = found.mean(across)
        assert float((means - (1 - draw.p)).abs().max()) < 6 * (draw.p * (1 - draw.p) / count) ** 0.5
    neighbours = (found[:, 1:] - found.mean()) * (found[:, :-1] - found.mean())
    assert abs(float(neighbours.mean())) < 5 * spread


def adapted(*names: str, masks: Literal["drawn", "counted"] = "counted") -> nn.ModuleDict:
    """Linear modules with adapters and dropout, whose forward is `frozen`'s."""
    layers = nn.ModuleDict({name: nn.Linear(24, 16) for name in names})
    get_peft_model(nn.Sequential(layers), LoraConfig(r=2, lora_dropout=0.3, target_modules=list(names)))  # type: ignore[arg-type]
    for name, module in layers.items():
        module.lora_dropout["default"] = SeededDropout(0.3, name, masks == "counted")
        module.lora_dropout["default"].draw = "1/2/3"
        module.forward = frozen.Adapted(module, 2048, module.forward)
    return layers


def test_what_ran_says_how_masks_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = adapted("first", "second"), torch.randn(1, 5, 24)
    assert dropout.counted_masks(layers) == "none made"
    layers["first"](x)
    assert dropout.counted_masks(layers) == "written out"
    drawn = adapted("first", masks="drawn")
    drawn["first"](x)
    assert dropout.counted_masks(drawn) is None

    layers = adapted("first", "second")
    monkeypatch.setattr(counted, "available", lambda _: True)
    monkeypatch.setattr(counted, "down", lambda x, a, draw: x @ a.mT)
    layers["first"](x)
    layers["second"].eval()(x)
    assert dropout.counted_masks(layers) == "in registers"
    layers["second"].base_layer.weight.requires_grad_(True)  # which products with frozen weights leave alone
    layers["second"].train()(x)
    assert dropout.counted_masks(layers) == "in registers; written out in 1 of 2 modules, second the first"
    layers["first"].forward.otherwise(x)
    assert dropout.counted_masks(layers) == "in registers; written out in 2 of 2 modules, first the first"


def test_kernels_say_it_where_masks_are_counted() -> None:
    assert outcome.kernels(Config(), CPU, "written out")["adapter_masks"] == "written out"
    assert "adapter_masks" not in outcome.kernels(Config(), CPU)


def test_dropout_with_counted_masks() -> None:
    module = SeededDropout(0.3, "here", counted=True)
    module.draw = "1/2/3"
    x = torch.randn(40, 24, dtype=torch.float64)
    out = module(x)
    stays = counted.keep(module.drawn(), 40, 24, CPU)
    torch.testing.assert_close(out, torch.where(stays, x / (1 - module.dropped), 0.0))
    module.first_row = 7  # no block's beginning: counted masks have none
    assert torch.equal(module(x[7:]), out[7:])
    module.draw = "1/2/4"
    assert not torch.equal(module(x[7:]), out[7:])
    assert torch.equal(module.eval()(x), x)
