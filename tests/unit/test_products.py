"""Small parts of adapters' gradients: scaled products, and sums over tiles."""

from __future__ import annotations

import pytest
import torch

from prefix_train import products
from prefix_train.frozen import Sums
from prefix_train.products import Weights

SCALES = (0.25, 1.0, 2.0, 4.0)
"""Powers of two."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [*SCALES, 1 / 3, 2 / 0.7])
def test_a_scaled_product_has_the_bits_of_one_that_is_scaled_afterwards(dtype: torch.dtype, scale: float) -> None:
    for seed, (rows, inner, columns) in enumerate([(1, 1, 1), (33, 17, 5), (8, 4500, 16), (5120, 48, 4)]):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(rows, inner, generator=draw).to(dtype), torch.randn(inner, columns, generator=draw).to(dtype)
        assert torch.equal(products._scaled(x, y, scale), (x @ y).mul_(scale))
        assert torch.equal(products._scaled(y.mT, x.mT, scale), (y.mT @ x.mT).mul_(scale))


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_sums_over_tiles_are_float32s_and_rounded_once(tiles: int) -> None:
    draw = torch.Generator().manual_seed(tiles)
    parts = [tuple(torch.randn(shape, generator=draw).bfloat16() for shape in ((2, 9), (7, 2))) for _ in range(tiles)]
    weights = Weights(torch.empty(7, 9), None, torch.empty(2, 9).bfloat16(), torch.empty(7, 2).bfloat16())
    sums = Sums()
    for a, b in parts:
        sums.add((a, b))
    for place, found in enumerate(sums.of(weights)):
        wanted = parts[0][place].float()
        for part in parts[1:]:
            wanted = wanted + part[place].float()
        assert found is not None
        assert torch.equal(found, wanted.bfloat16())


def test_no_adapter_has_no_sums_and_no_rows() -> None:
    sums = Sums()
    sums.add(None)
    assert sums.of(Weights(torch.empty(7, 9), None, None, None)) == (None, None)
    assert products.rows([None, None]) is None


def test_rows_of_one_tile_are_not_copied() -> None:
    tile = torch.randn(3, 2)
    assert products.rows([tile]) is tile
    rows = products.rows([tile, tile])
    assert rows is not None
    assert torch.equal(rows, torch.cat([tile, tile]))
