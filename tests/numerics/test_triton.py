"""Our Triton kernels, interpreted on the CPU: each file of tests/interpreted in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "interpreted"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels(path: Path) -> None:
    program = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        program, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.lower()
