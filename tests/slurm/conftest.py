"""The cluster, started once per session, healthy before each test.

Where it cannot be had, its tests are skipped and say why; with PREFIX_TRAIN_NEED_CLUSTER=1 they fail instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import lab as labs
from tests.slurm.lab import Lab, LabError

NEEDED = "PREFIX_TRAIN_NEED_CLUSTER"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that use the cluster run in one process: two clusters would halve the machine."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.xdist_group("cluster"))


@pytest.fixture(scope="session")
def running_lab() -> Iterator[Lab]:
    root = Path(tempfile.mkdtemp(prefix="slb", dir="/tmp"))  # short: Unix sockets lie in it
    lab = Lab(root)
    try:
        start(lab)
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(root)


def start(lab: Lab) -> None:
    """Install what is missing and start, or skip."""
    try:
        if labs.missing():
            labs.install()
        lab.start(die_with_caller=True)
    except LabError as error:
        if os.environ.get(NEEDED) == "1":
            raise
        pytest.skip(f"no Slurm cluster here: {error}")


@pytest.fixture
def lab(running_lab: Lab) -> Iterator[Lab]:
    yield running_lab
    running_lab.heal()
