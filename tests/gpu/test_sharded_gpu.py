"""The checks of two ranks, over NCCL on two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import sharded_run
from tests.sharded_checks import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    for rank, told in enumerate(sharded_run.outcomes(tmp_path, ["checks"], gpus=True)["checks"]):
        assert not told.ended, f"rank {rank}: {told.ended}"
        assert told.checks.keys() == CHECKS.keys()
        assert not any(told.checks.values()), f"rank {rank}: {told.checks}"
