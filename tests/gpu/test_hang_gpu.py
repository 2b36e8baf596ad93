"""Ranks that are missing from a real NCCL collective under FSDP2: flight recorder, readings and verdict."""

from __future__ import annotations

import pytest
import torch

from slurm.evidence import Rank
from slurm.finish import HUNG
from slurm.views import case
from tests.gpu import hang_run
from tests.gpu.hang_run import PLANS, WORLD, Found
from tests.hangs import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module", params=PLANS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Found]:
    return request.param, hang_run.hang(tmp_path_factory.mktemp("hangs"), request.param)


def test_r30_a_rank_that_left_is_named(found: tuple[str, Found]) -> None:
    name, run = found
    print(run.said.text())
    assert (run.said.kind, run.said.ranks, run.status) == (PLANS[name].kind, (PLANS[name].rank,), HUNG)
    assert "all_gather (" in run.said.sentence
    assert f"Spinning, not computing: rank {1 - PLANS[name].rank} " in run.said.sentence
    assert run.said.confidence == "high"
    assert run.noticed_s < 15
    assert run.judged_s - run.noticed_s < 30


def test_r30_the_frozen_evidence_says_the_same(found: tuple[str, Found]) -> None:
    _, run = found
    assert run.right
    assert "/tmp/" not in "".join(path.read_text() for path in run.case.rglob("*.json"))


def test_the_flight_recorder_tells_what_is_over_on_the_device(found: tuple[str, Found]) -> None:
    name, run = found
    frozen = cases.read(run.case)
    (node,) = frozen.nodes
    waits, left = (node.ranks[rank] for rank in (1 - PLANS[name].rank, PLANS[name].rank))
    assert not any("flight recorder" in reason for rank in node.ranks for reason in rank.missing)
    assert sum(one.ended is not None for one in waits.collectives) > 10
    view = case(frozen.nodes, frozen.alarm, WORLD, ("node1",)).view(waits.rank)
    assert view.pending is not None
    assert (view.pending.kind, view.pending.phase) == ("all_gather", PLANS[name].phase)
    assert view.waits
    assert all(one.state == "done" for one in left.collectives)
    assert view.pending.number == _last(left) + 1


def _last(rank: Rank) -> int:
    return max(one.number for one in rank.collectives if one.group == rank.collectives[-1].group)
