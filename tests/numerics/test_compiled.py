"""Our convolution's kernels compiled for an H100 or H200 without one: how wide memory is read, and what spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_train import forest_conv
from prefix_train.layout import Layout
from tests import hopper

PARTS = (2048, 2048, 6144)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each kernel as a layer of 10,240 channels, frozen, would launch it, by name."""
    made = hopper.compile_only(tmp_path, monkeypatch)
    layout = Layout.from_tree([70, 5], [-1, 0])
    x, weight = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((75, sum(PARTS)), (sum(PARTS), 4)))
    outputs = forest_conv.forward(x, weight, None, layout, True, PARTS)
    forest_conv.backward(outputs, x, weight, None, layout, True, False)
    return made


@pytest.mark.slow
def test_convolution_for_hopper(compiled: dict[str, Any], tmp_path: Path) -> None:
    """Rows are read and written 16 bytes at a time: 3 before a tile, 4 more, and in the loop 4, and 4 of the output; in
    backward twice 4 and 4, and 4 of twice the size. Besides, taps are read one by one, once for all rows of a tile, and
    numbers of the table."""
    assert {name: hopper.memory(kernel) for name, kernel in compiled.items() if name != "_add_kernel"} == {
        "_forward_kernel": {"ld v4.b32": 11, "ld b16": 32, "ld b32": 5, "st v4.b32": 4},
        "_backward_kernel": {"ld v4.b32": 19, "ld b16": 32, "ld b32": 11, "st v4.b32": 12},
    }
    assert compiled.keys() == {"_forward_kernel", "_backward_kernel", "_add_kernel"}
    for name, most in (("_forward_kernel", 128), ("_backward_kernel", 255), ("_add_kernel", 64)):
        assert hopper.registers(compiled[name], tmp_path) <= most, name  # 16, 8 and 32 warps of a processor's 65,536
