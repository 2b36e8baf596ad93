"""How the two ranks of the sharding checks are started where a library has used CUDA by being imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sharded_run
from tests.sharded_run import Told

ASKS_FOR_THE_DEVICE = """
import os
import sys


def forked():
    print("Cannot re-initialize CUDA in forked subprocess", file=sys.stderr, flush=True)
    os._exit(1)


os.register_at_fork(after_in_child=forked)
"""
"""In place of flash-linear-attention: what a process is left with that has imported it and is forked then."""


def ranks(folder: Path, start: str) -> list[Told]:
    library = folder / "fla"
    library.mkdir()
    (library / "__init__.py").write_text(ASKS_FOR_THE_DEVICE)
    environment = {"PYTHONPATH": str(folder)}
    return sharded_run.outcomes(folder, ["agreement"], gpus=False, start=start, environment=environment)["agreement"]


@pytest.mark.slow
def test_ranks_on_gpus_are_spawned(tmp_path: Path) -> None:
    assert ranks(tmp_path, sharded_run.start_of(gpus=True)) == [Told({"agreement": ""}, "")] * 2


def test_forked_ranks_die_and_say_of_what(tmp_path: Path) -> None:
    for told in ranks(tmp_path, sharded_run.start_of(gpus=False)):
        assert told.checks == {}
        assert told.ended.startswith("exit status 1; it printed:\n")
        assert "Cannot re-initialize CUDA in forked subprocess" in told.ended
