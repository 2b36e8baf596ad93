"""Lines of the kernel's log that tell of GPUs, killed processes, hung tasks and file systems."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path

from preflight.programs import ask

TELLING = re.compile(
    r"Xid|NVRM|[Kk]illed process|[Oo]ut of memory|oom-kill|invoked oom|blocked for more than|not responding|timed out"
    r"|I/O error|LustreError|segfault|general protection|Machine check|Hardware Error|link is down|Link down"
)
FILES = (Path("/var/log/kern.log"), Path("/var/log/syslog"), Path("/var/log/messages"))
DEADLINE_S = 5.0
TAIL_BYTES = 1 << 20
MAX_LINES = 50

AHEAD_S = 60.0
"""A time that is further ahead is one of last year."""


class Unreadable(RuntimeError):
    """The kernel's log cannot be read: why."""


def lines(since_s: float) -> tuple[str, ...]:
    """The last telling lines, at most MAX_LINES, of the last `since_s` seconds. Raises Unreadable."""
    try:
        answer = ask(["dmesg"], DEADLINE_S)
        reason = "no answer in time" if answer.status is None else answer.last_error_line
    except FileNotFoundError:
        answer, reason = None, "there is no dmesg"
    if answer is not None and answer.status == 0:
        return of_dmesg(answer.stdout, time.clock_gettime(time.CLOCK_BOOTTIME) - since_s)
    for path in FILES:
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = stream.read().decode(errors="replace")
        except OSError:
            continue
        return of_syslog(text, since_s, time.time())
    raise Unreadable(f"kernel log: dmesg: {reason}; and no file in /var/log can be read")


def of_dmesg(text: str, begin: float) -> tuple[str, ...]:
    """Telling lines from `begin` on, seconds since boot."""
    found = re.findall(r"^(?:<\d+>)?(\[ *(\d+\.\d+)\] .*)$", text, re.MULTILINE)
    return tuple(line for line, clock in found if float(clock) >= begin and TELLING.search(line))[-MAX_LINES:]


def of_syslog(text: str, since_s: float, now: float) -> tuple[str, ...]:
    """Telling lines of the kernel of the `since_s` before `now`, seconds since 1970, whose time is understood."""
    found = [(_time(line, now), line) for line in text.splitlines() if " kernel: " in line and TELLING.search(line)]
    return tuple(line for when, line in found if when is not None and when >= now - since_s)[-MAX_LINES:]


def _time(line: str, now: float) -> float | None:
    """The time at the beginning of a line of syslog, in ISO 8601 or in its old form.

    The old form says neither the year nor which of two equal hours when clocks go back: it is the latest before `now`.
    """
    try:
        return datetime.fromisoformat(line.split(" ")[0]).timestamp()
    except ValueError:
        this = datetime.fromtimestamp(now).year
        found = [when for year in (this, this - 1) for when in _times(f"{year} {line[:15]}")]
        return max((when for when in found if when <= now + AHEAD_S), default=None)


def _times(text: str) -> list[float]:
    try:
        first = datetime.strptime(text, "%Y %b %d %H:%M:%S")
    except ValueError:
        return []
    return [first.timestamp(), first.replace(fold=1).timestamp()]
