"""A measurement in a process of its own, which tells what it has found so far in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def run(
    name: str, module: str, *arguments: str, told: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """The last document that `python -m module` writes; each is `told` at once.

    Raises RuntimeError, which calls the process by `name`, where it does not end well.
    """
    found: dict[str, Any] = {}
    program = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                told(found)
    if running.returncode:
        raise RuntimeError(f"{name} ended with status {running.returncode}")
    return found
