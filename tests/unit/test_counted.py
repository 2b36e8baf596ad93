"""Masks that are functions of a seed, a row and a column."""

from __future__ import annotations

import pytest
import torch

from configs.schema import AdapterConfig, Config
from prefix_train import counted, outcome
from prefix_train.counted import Draw
from prefix_train.dropout import SeededDropout

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


def test_a_mask_is_a_function_of_place() -> None:
    whole = counted.keep(Draw(5, 0, 20000), 90, 70, CPU)
    for first, rows, columns in ((0, 90, 70), (33, 20, 70), (64, 26, 9)):
        part = counted.keep(Draw(5, first, 20000), rows, columns, CPU)
        assert torch.equal(part, whole[first : first + rows, :columns])
    for other in (Draw(6, 0, 20000), Draw(5 + (1 << 32), 0, 20000), Draw(5, 1, 20000)):
        share = float((counted.keep(other, 90, 70, CPU) == whole).double().mean())
        assert 0.5 < share < 0.65  # of two independent masks 0.576 agree


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


def test_what_ran_says_where_masks_were_made() -> None:
    config = Config(adapter=AdapterConfig(masks="counted"))
    assert outcome.kernels(config, CPU)["adapter_masks"] == "written out"
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
