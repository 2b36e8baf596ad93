"""The kernels of norms compiled for an H100 or H200 without one: how wide memory is read, and what spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import hopper


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each kernel as a frozen layer with hidden size 5,120 and heads of 128 would launch it, by name."""
    from prefix_train import norms_triton

    made = hopper.compile_only(tmp_path, monkeypatch)
    hidden, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((75, 5120), (5120,)))
    heads, of_head = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((75, 128), (128,)))
    _, _, scales = norms_triton.rows(hidden, hidden.clone(), weight, 1e-6, True)
    norms_triton.rows_backward(hidden, hidden.clone(), hidden.clone(), weight, scales, True, False)
    norms_triton.gated(heads, heads.clone(), of_head, 1e-6, heads.clone())
    norms_triton.gated_backward(heads, heads.clone(), heads.clone(), of_head, 1e-6, heads.clone(), False)
    return made


@pytest.mark.slow
def test_norms_for_hopper(compiled: dict[str, Any], tmp_path: Path) -> None:
    """Rows are read and written 16 bytes at a time, nothing spills, and a processor has several programs at a time: 4
    and 2 of 8 warps, 8 and 5 of 4. Besides, a scale is written and read, and a head's weight one by one."""
    found = {name: hopper.memory(kernel) for name, kernel in compiled.items()}
    assert {name: {way: count for way, count in one.items() if way != "shared"} for name, one in found.items()} == {
        "_rows_kernel": {"ld v4.b32": 12, "st v4.b32": 8, "st b32": 1},
        "_rows_backward_kernel": {"ld v4.b32": 16, "ld b32": 1, "st v4.b32": 4},
        "_gated_kernel": {"ld b16": 1, "ld v4.b32": 4, "st v4.b32": 2},
        "_gated_backward_kernel": {"ld b16": 1, "ld v4.b32": 6, "st v4.b32": 4},
    }
    most = {"_rows_kernel": 64, "_rows_backward_kernel": 128, "_gated_kernel": 64, "_gated_backward_kernel": 96}
    for name, kernel in compiled.items():
        assert hopper.registers(kernel, tmp_path) <= most[name], name
