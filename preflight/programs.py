"""Run a program with a deadline that ends its whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a program printed and how it ended. status: None where the deadline ended it."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def last_error_line(self) -> str:
        """The last non-empty line of stderr: a Python program's exception."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with status {self.status} and no message"


def ask(argv: Sequence[str], deadline_s: float) -> Answer:
    """Run `argv` without a shell; after `deadline_s` kill its process group, children included.

    Raises FileNotFoundError where the program does not exist.
    """
    program = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = program.communicate(timeout=deadline_s)
        return Answer(program.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        stdout, stderr = program.communicate()
        return Answer(None, stdout, stderr)
