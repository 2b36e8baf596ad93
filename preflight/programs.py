"""Run a program with a deadline that ends its whole process group; and be such a program."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

GIVE_UP_S = 2.0
"""How long a killed program is waited for: one that sits in the kernel, on a dead file server say, never ends."""


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

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The whole lines of stdout that are JSON objects; libraries may print others."""
        lines = self.stdout.split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


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
    try:
        stdout, stderr = program.communicate(timeout=GIVE_UP_S)
        return Answer(None, stdout, stderr)
    except subprocess.TimeoutExpired as unkillable:
        return Answer(None, _text(unkillable.output), _text(unkillable.stderr))


def one_by_one(
    argv: Sequence[str], items: Sequence[str], left_s: Callable[[], float]
) -> Iterator[tuple[str, dict[str, Any] | Answer]]:
    """Ask a program about `items`, in order; it prints one JSON object for each, as soon as it has it.

    An item whose turn ended the program, or the time, yields how; the program is started again behind it.
    left_s: seconds that the next start may take.
    """
    waiting = list(items)
    while waiting:
        answer = ask([*argv, *waiting], left_s())
        documents = answer.documents[: len(waiting)]
        yield from zip(waiting, documents, strict=False)
        waiting = waiting[len(documents) :]
        if waiting:
            yield waiting.pop(0), answer


def answer_and_end(main: Callable[[], None]) -> NoReturn:
    """Be a program that imports much, answers and ends. It collects no garbage and takes no module down at its end:
    both together are a third of the CPU time of one that imports torch and transformers.
    """
    gc.disable()
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
