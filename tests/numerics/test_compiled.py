"""Our convolution's kernels compiled for an H100 or H200 without one: how wide memory is read, and what spills."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_train import forest_conv
from prefix_train.layout import Layout

PARTS = (2048, 2048, 6144)


class Hopper:
    """A driver as far as compiling asks; its device is nobody's."""

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each kernel as a layer of 10,240 channels, frozen, would launch it, by name."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    made: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        made[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **kwargs)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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
    from triton import knobs

    assert {name: memory(kernel) for name, kernel in compiled.items() if name != "_add_kernel"} == {
        "_forward_kernel": {"ld v4.b32": 11, "ld b16": 32, "ld b32": 5, "st v4.b32": 4},
        "_backward_kernel": {"ld v4.b32": 19, "ld b16": 32, "ld b32": 11, "st v4.b32": 12},
    }
    assert compiled.keys() == {"_forward_kernel", "_backward_kernel", "_add_kernel"}
    for name, registers in (("_forward_kernel", 128), ("_backward_kernel", 255), ("_add_kernel", 64)):
        given = tmp_path / f"{name}.ptx"
        given.write_text(compiled[name].asm["ptx"])
        program = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(given), "-o", str(tmp_path / "out")]
        said = subprocess.run(program, capture_output=True, text=True, check=True).stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in said
        used = re.search(r"Used (\d+) registers", said)
        assert used is not None
        assert int(used[1]) <= registers, name  # 16, 8 and 32 warps of a processor's 65,536


def memory(kernel: Any) -> dict[str, int]:
    """How often which width of global memory is read and written, and shared memory at all."""
    found = re.findall(r"\b(ld|st)\.(global|shared)\S*?((?:\.v\d)?\.b\d+)", kernel.asm["ptx"])
    return dict(Counter(f"{way} {width[1:]}" if space == "global" else space for way, space, width in found))
