"""The checks of two ranks, over NCCL on two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import sharded_checks

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    for rank, found in enumerate(sharded_checks.outcomes(tmp_path, ["checks"], gpus=True)["checks"]):
        assert found is not None, f"rank {rank} died"
        assert found.keys() == sharded_checks.CHECKS.keys()
        assert not any(found.values()), f"rank {rank}: {found}"
