"""What the kernel says of a process and its children: states, times, bytes, and the files of a blocked read.

Only /proc is read, and no file of the process is touched: a file system that hangs would hang the reader too.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from preflight import mounts
from preflight.mounts import Mount
from slurm.evidence import Process

BLOCKED = "D"
MAX_FILES, MAX_CHILDREN = 20, 32
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ON_FILES = ("0", "1", "8", "17", "18", "19", "20", "74", "75", "217", "295", "296")
"""System calls of x86-64 on an open file: read, write, lseek, pread64, pwrite64, readv, writev, fsync, ..."""


def look(pid: int) -> Process:
    """Process `pid` as it is now; without a state where it is gone. Raises PermissionError where /proc is closed."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        blocked = _blocked_threads(pid)
        read, written = _bytes(pid)
        return Process(
            pid=pid,
            name=name,
            state=fields[0],
            wchan=_wchan(Path(f"/proc/{pid}/task/{blocked[0]}" if blocked else f"/proc/{pid}")),
            cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
            read_bytes=read,
            written_bytes=written,
            rss_bytes=int(fields[21]) * _PAGE,
            blocked_files=open_files(pid, blocked) if blocked else (),
        )
    except (FileNotFoundError, ProcessLookupError):
        return Process(pid, "", "", "", 0.0, 0, 0, 0, ())


def children(pid: int) -> tuple[Process, ...]:
    """All processes below `pid`, at most MAX_CHILDREN."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return ()
    return tuple(look(child.pid) for child in found[:MAX_CHILDREN])


def environment(pid: int) -> dict[str, str]:
    """The environment that process `pid` was started with; empty where it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def open_files(pid: int, threads: tuple[int, ...]) -> tuple[str, ...]:
    """Open files of `pid` with the kind of their file system, those that `threads` are at first: `/a/b [nfs4]`."""
    table = mounts.parse(Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape"))
    at = [number for thread in threads if (number := _descriptor(pid, thread))]
    numbers = sorted(os.listdir(f"/proc/{pid}/fd"), key=lambda number: (number not in at, int(number)))
    found = []
    for number in numbers:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/sys/", "/memfd:")):
            found.append(f"{_shown(target)} [{_kind(Path(target), table)}]")
    return tuple(dict.fromkeys(found))[:MAX_FILES]


def _blocked_threads(pid: int) -> tuple[int, ...]:
    """Threads that wait in the kernel where no signal reaches them."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (thread / "stat").read_text(errors="replace")
        except OSError:
            continue
        if stat[stat.rindex(")") + 2 :][:1] == BLOCKED:
            found.append(int(thread.name))
    return tuple(sorted(found))


def _descriptor(pid: int, thread: int) -> str | None:
    """The open file that a thread's present system call is about; None where that is not told."""
    try:
        call, first, *_ = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    except (OSError, ValueError):
        return None
    return str(int(first, 16)) if call in _ON_FILES else None


def _bytes(pid: int) -> tuple[int, int]:
    """Bytes read and written: by system calls, and from disk, which includes mapped files."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except PermissionError:
        return 0, 0
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["rchar"] + counts["read_bytes"], counts["wchar"] + counts["write_bytes"]


def _wchan(folder: Path) -> str:
    try:
        found = (folder / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
    return "" if found == "0" else found


def _kind(path: Path, table: list[Mount]) -> str:
    """By the name alone: to resolve it could hang."""
    above = [mount for mount in table if path.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(mount.point.parts)).kind if above else "unknown"


def _shown(target: str) -> str:
    return target.encode(errors="replace").decode().replace("\n", "?")
