"""An adapter's products with masks drawn in registers against the same masks written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from prefix_train import counted, frozen
from prefix_train.counted import Draw
from prefix_train.dropout import SeededDropout

SHAPES = [(1, 16, 1), (70, 200, 3), (130, 129, 8), (64, 128, 16)]
"""Rows, columns, rank."""


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


HELD = torch.tensor(1 << 61 | 12345)
"""A seed that lies in memory."""


@pytest.mark.parametrize("draw", [Draw(3, 0, 20000), Draw(1 << 61 | 12345, 6144, 3277), Draw(HELD, 6144, 3277)])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: tuple[int, int, int], draw: Draw) -> None:
    rows, columns, rank = shape
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        x, a, up = (
            drawn(*sizes, seed=seed, dtype=dtype)
            for seed, sizes in enumerate([(rows, columns + 3), (rank, columns), (rows, rank)])
        )
        x = x[:, 1 : columns + 1]  # rows of a wider tensor
        kept = torch.where(counted.keep(draw, rows, columns, x.device), x.double(), 0.0)
        low = counted.down(x, a, draw).double() - kept @ a.double().T
        assert float(low.norm() / (kept.abs() @ a.double().abs().T).norm()) < bound  # terms of one sum may cancel
        before = drawn(rows, columns, seed=9, dtype=dtype)
        stays = counted.keep(draw, rows, columns, x.device)
        through = stays * (up.double() @ a.double())
        for more in (False, True):
            into = before.clone()
            of_a = counted.back(up, x, a, draw, into, more)
            assert of_a.dtype == torch.float32
            assert error(of_a, up.double().T @ kept) < bound
            assert error(into, before.double() + through if more else through) < bound
        assert torch.equal(counted.back(up, x, a, draw, None, False), of_a)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(48, 72, False), nn.Linear(48, 72, False)
        self.down_proj, self.act_fn = nn.Linear(72, 48, False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


def block_with_adapters() -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_dropout=0.2, target_modules=["gate_proj", "up_proj", "down_proj"])
    block = get_peft_model(Block(), config).base_model.model  # type: ignore[arg-type]
    for name, module in block.named_modules():
        if hasattr(module, "lora_dropout"):
            nn.init.normal_(module.lora_B["default"].weight, 0.0, 0.5)
            module.lora_dropout["default"] = SeededDropout(0.2, name, counted=True)
            module.lora_dropout["default"].draw = "1/2/3"
    return block.train()


def through(block: Any, forward: Any, x: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    out = forward(given)
    learned = [one for one in block.parameters() if one.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * drawn(*out.shape, seed=4)).sum(), [given, *learned])]


@pytest.mark.parametrize("planted", [False, True])
def test_a_feed_forward_in_tiles(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """planted, the fault: the kernels are told another first row than the masks that are written out."""
    block, x = block_with_adapters(), drawn(1, 4100, 48, seed=1)[:, :150]
    mine = frozen.FeedForward(block, 64, "torch", lambda _: pytest.fail("not what is written out"))
    wanted = through(block, block, x)
    calls, down = [], counted.down

    def spied(x: Tensor, a: Tensor, draw: Draw) -> Tensor:
        calls.append(draw)
        return down(x, a, draw._replace(first_row=draw.first_row + 1) if planted else draw)

    monkeypatch.setattr(counted, "in_registers", counted.fits)
    monkeypatch.setattr(counted, "down", spied)
    found = through(block, mine, x)
    assert calls
    worst = max(error(one, other.double()) for one, other in zip(found, wanted, strict=True))
    assert worst > 0.1 if planted else worst < 1e-5
