"""Where a process is, seen from outside: native and Python frames where tracing is allowed, else what is left.

Nothing here depends on the process's cooperation: it may be stopped, hold the interpreter lock, or wait in C.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATIVE_TIMEOUT_S, PYTHON_TIMEOUT_S = 6.0, 2.0
"""Longest wait for py-spy, with native frames and without: reading a large process's symbols takes seconds."""
ANSWER_TIMEOUT_S = 2.0
"""Longest wait for the process's own answer to SIGUSR1."""

MAX_NAME = 160
"""Letters of a frame's name that are shown: instances of C++ templates have thousands."""

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
    "X": "dead",
}


@dataclass(frozen=True)
class Frame:
    """One frame; `line` is 0 where it is not known."""

    name: str
    file: str
    line: int
    native: bool

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        name = self.name if len(self.name) <= MAX_NAME else f"{self.name[:MAX_NAME]}..."
        return f"{name} ({place})"


@dataclass(frozen=True)
class Thread:
    """One thread's frames, innermost first; `holds_lock`: it has the interpreter lock, None where nobody knows."""

    name: str
    main: bool
    holds_lock: bool | None
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Stack:
    """What could be seen of one process."""

    pid: int
    state: str
    """Letter of /proc/PID/stat; empty: there is no such process."""
    wchan: str
    """Kernel function that it waits in; empty where that is not told."""
    kernel: tuple[str, ...]
    method: str
    """What gave `threads`: `py-spy --native`, `py-spy`, `faulthandler`, or `none`."""
    missing: tuple[str, ...]
    """What could not be had, and why."""
    threads: tuple[Thread, ...]

    @property
    def stopped(self) -> bool:
        """Stopped by a signal or a tracer."""
        return self.state in ("T", "t")

    @property
    def main(self) -> Thread | None:
        """The main thread."""
        return next((thread for thread in self.threads if thread.main), None)

    @property
    def lock_holder(self) -> Thread | None:
        """The thread that has the interpreter lock."""
        return next((thread for thread in self.threads if thread.holds_lock), None)


def python_frames(thread: Thread) -> tuple[Frame, ...]:
    """The Python frames of `thread`, innermost first."""
    return tuple(frame for frame in thread.frames if not frame.native)


def sample(pid: int, answer: Path | None = None) -> Stack:
    """Look at process `pid`. `answer`: the file that its faulthandler writes to on SIGUSR1, used as a last resort."""
    state, wchan = proc_state(pid), _read_proc(pid, "wchan")
    kernel = tuple(line.split("] ", 1)[-1] for line in _read_proc(pid, "stack").splitlines())
    missing: list[str] = []
    method, threads = "none", tuple[Thread, ...]()
    if state not in ("", "Z", "X"):
        method, threads = _look(pid, state, answer, missing)
    return Stack(pid, state, "" if wchan == "0" else wchan, kernel, method, tuple(missing), threads)


def proc_state(pid: int) -> str:
    """The process's state letter; empty where there is none."""
    stat = _read_proc(pid, "stat")
    return stat.rpartition(") ")[2][:1]


def render(stack: Stack) -> str:
    """`stack` as text for people."""
    lines = [f"pid {stack.pid}: {STATES.get(stack.state, stack.state) or 'gone'}; frames by {stack.method}"]
    if stack.wchan:
        lines.append(f"waits in the kernel at {stack.wchan}")
    lines += [f"not to be had: {reason}" for reason in stack.missing]
    for thread in sorted(stack.threads, key=lambda thread: not thread.main):
        lock = ", holds the interpreter lock" if thread.holds_lock else ""
        lines += ["", f"thread {thread.name}{lock}, innermost frame first:"]
        lines += [f"  {'C  ' if frame.native else '   '}{frame}" for frame in thread.frames]
    if stack.kernel:
        lines += ["", "kernel:", *(f"  {line}" for line in stack.kernel)]
    return "\n".join(lines) + "\n"


def _look(pid: int, state: str, answer: Path | None, missing: list[str]) -> tuple[str, tuple[Thread, ...]]:
    """Frames by the best means that works; why the better ones did not is added to `missing`."""
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        missing.append("native frames: py-spy is not installed")
    else:
        # A process that is stopped, or that no signal reaches, cannot be suspended; its memory can still be read.
        ways = [("py-spy", ["--nonblocking"], PYTHON_TIMEOUT_S)]
        if state not in ("T", "t", "D"):
            ways.insert(0, ("py-spy --native", ["--native"], NATIVE_TIMEOUT_S))
        for method, options, timeout_s in ways:
            try:
                return method, _py_spy(program, pid, options, timeout_s)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                missing.append(f"{method}: {_reason(error)}")
    if answer is not None and state not in ("T", "t"):
        if threads := _ask(pid, answer):
            return "faulthandler", threads
        missing.append(f"faulthandler: no answer to SIGUSR1 within {ANSWER_TIMEOUT_S:g} s")
    elif answer is not None:
        missing.append("faulthandler: a stopped process answers no signal")
    return "none", ()


def _py_spy(program: str, pid: int, options: list[str], timeout_s: float) -> tuple[Thread, ...]:
    command = [program, "dump", "--json", "--full-filenames", *options, "--pid", str(pid)]
    found = subprocess.run(command, capture_output=True, check=True, timeout=timeout_s)
    return tuple(_thread(item, pid) for item in json.loads(found.stdout))


def _thread(item: dict[str, Any], pid: int) -> Thread:
    frames = tuple(
        Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]), frame["module"] is not None)
        for frame in item["frames"]
    )
    main = item["os_thread_id"] == pid or item["thread_name"] == "MainThread"
    return Thread(str(item["thread_name"] or item["os_thread_id"]), main, bool(item["owns_gil"]), frames)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        causes = [line for line in lines if not line.startswith(("Error:", "Caused by"))]
        return re.sub(r"^\d+: ", "", (causes or lines or [f"exit status {error.returncode}"])[0])
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    return f"{type(error).__name__}: {error}"


def _ask(pid: int, answer: Path) -> tuple[Thread, ...]:
    """The stacks that the process writes itself when it gets SIGUSR1; empty where it does not."""
    if not answer.exists():
        return ()
    before = answer.stat().st_size
    os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + ANSWER_TIMEOUT_S
    size = before
    while time.monotonic() < end:
        time.sleep(0.1)
        last, size = size, answer.stat().st_size
        if size > before and size == last:
            break
    with answer.open(encoding="utf-8", errors="replace") as stream:
        stream.seek(before)
        return parse_faulthandler(stream.read())


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """Threads as faulthandler prints them; the main thread, being the oldest, is the last one."""
    blocks = re.split(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n", text, flags=re.MULTILINE)[1:]
    names, bodies = blocks[::2], blocks[1::2]
    threads = []
    for place, (name, body) in enumerate(zip(names, bodies, strict=True)):
        found = re.findall(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', body, flags=re.MULTILINE)
        frames = tuple(Frame(what, file, int(line) if line.isdigit() else 0, False) for file, line, what in found)
        threads.append(Thread(name, place == len(names) - 1, None, frames))
    return tuple(threads)


def _read_proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""
