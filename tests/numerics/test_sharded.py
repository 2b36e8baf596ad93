"""Two ranks under FSDP2 (gloo, CPU) against one rank without it. All checks run in one pair of processes."""

from __future__ import annotations

import pytest

from tests import sharded_checks
from tests.sharded_checks import Outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    scenarios = ["checks", *sharded_checks.FAULTS]
    return sharded_checks.outcomes(tmp_path_factory.mktemp("sharded"), scenarios, gpus=False)


@pytest.mark.parametrize("check", sharded_checks.CHECKS)
def test_two_ranks(check: str, outcomes: Outcomes) -> None:
    for rank, found in enumerate(outcomes["checks"]):
        assert (found or {}).get(check, "it did not get there") == "", f"rank {rank}: {found}"


def failed(outcomes: Outcomes, fault: str) -> bool:
    """Did any rank end with an error, or die?"""
    return any(found is None or found.get(fault, "died") for found in outcomes[fault])


def test_r15_fails_without_fix(outcomes: Outcomes) -> None:
    """A rank without a pack left just stops: the others wait until the timeout."""
    assert failed(outcomes, "unequal_packs")


def test_r23_fails_without_fix(outcomes: Outcomes) -> None:
    """A rank that meets a bad example skips it by itself: the other waits for it."""
    assert failed(outcomes, "skipped_by_one")


def test_a_rank_that_leaves_the_vision_tower_out_fails(outcomes: Outcomes) -> None:
    assert failed(outcomes, "no_blank_image")
