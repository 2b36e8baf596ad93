"""The kernels of `heads` compiled for sm_90 without a GPU: how they read memory, and that registers suffice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

NORMS = [("_rotate_kernel", {})] + [("_rotate_back_kernel", {"LEARNED": learned}) for learned in (False, True)]
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {"SIZE": size, "HALF": half, "NORM": norm, **more})
    for size, half in ((256, 32), (128, 64), (64, 16))
    for norm in (0, 1, 2)
    for name, more in NORMS
    if norm or not more.get("LEARNED")
] + [(name, {"SIZE": size}) for size in (256, 128, 64) for name in ("_gate_kernel", "_gate_back_kernel")]

PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from prefix_train import heads_triton
for name, given in json.loads(sys.argv[1]):
    given = {**given, **heads_triton._sizes(given["SIZE"])}
    kernel, kinds, aligned = getattr(heads_triton, name), {}, {}
    for place, one in enumerate(kernel.arg_names):
        number = one in ("count", "heads") or one.endswith(("_row", "_head"))
        kinds[one] = "constexpr" if one in given else "fp32" if one == "eps" else "i32" if number else "*bf16"
        if kinds[one] == "*bf16" or one.endswith(("_row", "_head")):
            aligned[(place,)] = [["tt.divisibility", 16]]
    if "sums" in kinds:
        kinds["sums"] = "*fp32"
    source = ASTSource(fn=kernel, signature=kinds, constexprs=given, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    print(json.dumps(triton.compile(source, target=target, options=heads_triton.ROUNDING).asm["ptx"]))
"""


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    """PTX of every case. In a process of its own: Triton decides as it is imported whether it interprets."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{CASES[number]}")
def test_moves_sixteen_bytes_at_a_time_and_spills_nothing(number: int, compiled: list[str], tmp_path: Path) -> None:
    """Only a norm's weight, one row for all tokens, may be read in smaller parts, and its gradient so be written."""
    given, ptx = CASES[number][1], compiled[number]
    moved = re.findall(r"(ld|st)\.global(?:\.[A-Za-z]\w*::\w+)*(?:\.(v\d))?\.([bf]\d+)", ptx)
    smaller = [one[0] for one in moved if one[1:] != ("v4", "b32")]
    assert {one[0] for one in moved if one[1:] == ("v4", "b32")} == {"ld", "st"}
    assert smaller.count("ld") <= (2 if given.get("NORM") else 0)
    assert smaller.count("st") <= (1 if given.get("LEARNED") else 0)
    assert not re.search(r"fma\.rn\.(relu\.)?b?f16", ptx), "a product that is to be rounded is not"
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [PTXAS, "-arch=sm_90a", "-v", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores, 0 bytes spill loads" in told
    (registers,) = re.findall(r"Used (\d+) registers", told)
    assert int(registers) <= 128  # four programs of 128 threads beside each other, and more
