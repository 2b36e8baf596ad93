"""Two ranks under FSDP2 (gloo, CPU) against one rank without it. All checks run in one pair of processes."""

from __future__ import annotations

import pytest

from tests import sharded_checks, sharded_run
from tests.sharded_run import Outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    scenarios = ["checks", *sharded_checks.FAULTS]
    return sharded_run.outcomes(tmp_path_factory.mktemp("sharded"), scenarios, gpus=False)


def named(begin: str) -> list[str]:
    return [check for check in sharded_checks.CHECKS if check.startswith(begin)]


def assert_passed(outcomes: Outcomes, check: str) -> None:
    for rank, told in enumerate(outcomes["checks"]):
        assert told.checks.get(check, "it did not get there") == "", f"rank {rank}: {told}"


@pytest.mark.parametrize("check", named("r14_"))
def test_r14_two_ranks_give_the_gradients_of_one(check: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, check)


def test_r14_fails_without_fix(outcomes: Outcomes) -> None:
    """FSDP2's own reduction averages: half the gradient, planted by the check itself."""
    assert_passed(outcomes, "mean_instead_of_sum")


@pytest.mark.parametrize("check", named("r15_"))
def test_r15_ranks_with_unequal_packs(check: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, check)


@pytest.mark.parametrize("check", named("r23_"))
def test_r23_a_bad_example_is_agreed_on(check: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, check)


@pytest.mark.parametrize("check", named("r29_"))
def test_r29_dropout_on_two_ranks(check: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, check)


@pytest.mark.parametrize("check", named("r17_"))
def test_r17_offloading_on_two_ranks(check: str, outcomes: Outcomes) -> None:
    """That it fails without its fix: `test_offload`."""
    assert_passed(outcomes, check)


@pytest.mark.parametrize("check", [check for check in sharded_checks.CHECKS if not check.startswith("r")])
def test_two_ranks(check: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, check)


def failed(outcomes: Outcomes, fault: str) -> bool:
    """Did any rank end with an error, or die?"""
    return any(told.ended or told.checks[fault] for told in outcomes[fault])


def test_r15_fails_without_fix(outcomes: Outcomes) -> None:
    """A rank without a pack left just stops: the others wait until the timeout."""
    assert failed(outcomes, "unequal_packs")


def test_r23_fails_without_fix(outcomes: Outcomes) -> None:
    """A rank that meets a bad example skips it by itself: the other waits for it."""
    assert failed(outcomes, "skipped_by_one")


def test_a_rank_without_an_image_runs_the_tower(outcomes: Outcomes) -> None:
    assert_passed(outcomes, "rank_without_image")


def test_a_rank_that_leaves_the_vision_tower_out_fails(outcomes: Outcomes) -> None:
    assert failed(outcomes, "no_blank_image")


def test_a_rank_that_dies_says_of_what(outcomes: Outcomes) -> None:
    alive, dead = outcomes["dies"]
    assert (alive.checks, alive.ended) == ({"dies": ""}, "")
    assert dead.checks == {}
    assert dead.ended.startswith("SIGABRT; it printed:")
    assert "in dies" in dead.ended  # the frame that faulthandler shows
