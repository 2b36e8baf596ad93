"""Shared by all tests: thread count, and the table that `make replays` prints."""

from __future__ import annotations

import os
import re
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

REPLAY = re.compile(r"test_(r\d\d)_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--replays", action="store_true", help="only the replays of public faults; print a table of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--replays"):
        config.hook.pytest_deselected(items=[item for item in items if not REPLAY.search(item.name)])
        items[:] = [item for item in items if REPLAY.search(item.name)]


def pytest_runtest_setup() -> None:
    """A command that begins a run's life says so in its own process: here in that of the tests that follow."""
    os.environ.pop("PREFIX_TRAIN_ATTEMPT", None)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)  # whatever ran before in this process


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--replays"):
        return
    rows = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            name = report.nodeid.split("::")[-1]
            if (match := REPLAY.search(name)) and (report.when == "call" or outcome != "passed"):
                rows.append((match[1].upper(), name, outcome))
    terminalreporter.section("replays")
    for replay, name, outcome in sorted(set(rows)):
        terminalreporter.write_line(f"{replay}  {outcome:8}{name}")
