"""Compiles Triton's kernels for an H100 or H200 without one, and says what came of it."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


class Hopper:
    """A driver as far as compiling asks; its device is nobody's."""

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """From now on launches only compile; the kernels that they made, by name. folder: of the cache."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    made: dict[str, Any] = {}
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        made[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **kwargs)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return made


def memory(kernel: Any) -> dict[str, int]:
    """How often which width of global memory is read and written, and shared memory at all."""
    found = re.findall(r"\b(ld|st)\.(global|shared)\S*?((?:\.v\d)?\.b\d+)", kernel.asm["ptx"])
    return dict(Counter(f"{way} {width[1:]}" if space == "global" else space for way, space, width in found))


def registers(kernel: Any, folder: Path) -> int:
    """How many each thread takes, none of which may spill to memory."""
    from triton import knobs

    given = folder / "kernel.ptx"
    given.write_text(kernel.asm["ptx"])
    program = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(given), "-o", str(folder / "out")]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    used = re.search(r"Used (\d+) registers", said)
    assert used is not None
    return int(used[1])
