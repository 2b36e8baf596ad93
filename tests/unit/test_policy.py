"""What follows the end of a life, cause by cause, and that no run comes back for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm import policy
from slurm.policy import Decision, Life, decide

NODES = ("node1", "node2")


def life(cause: policy.Cause | None, update: int = 5, culprits: tuple[str, ...] = (), attempt: int = 0) -> Life:
    return Life(attempt, "17", NODES, cause, update, culprits)


@pytest.mark.parametrize("cause", ["complete", "memory", "nan", "mistake", "raised", "setup", "unknown", "gate"])
def test_what_lies_in_the_run_itself_is_not_tried_again(cause: policy.Cause) -> None:
    assert decide([life(cause)], 3, exclude_unfit=False) == Decision(False, (), policy.WHY_STOP[cause])


@pytest.mark.parametrize("cause", sorted(policy.FAILURES - policy.PASSING))
def test_what_may_lie_outside_is_tried_again_without_the_culprit(cause: policy.Cause) -> None:
    assert decide([life(cause)], 3, False) == Decision(True, (), "on any nodes")
    assert decide([life(cause, culprits=("node2",))], 3, False) == Decision(True, ("node2",), "without node2")
    assert decide([life(cause, culprits=NODES)], 3, False).exclude == (), "not all nodes can be at fault"


@pytest.mark.parametrize("cause", sorted(policy.PASSING))
def test_what_often_passes_has_one_more_chance_before_a_node_is_left_out(cause: policy.Cause) -> None:
    first = life(cause, 4, ("node2",))
    assert decide([first], 3, False) == Decision(True, (), "once on any nodes: it may have passed")
    assert decide([first, life(cause, 5, ("node2",))], 3, False) == Decision(True, ("node2",), "without node2")
    assert decide([first, life(cause, 5)], 3, False) == Decision(False, (), f"{cause} twice, and no node can be named")
    assert not decide([first, life(cause, 5, NODES)], 3, False).again
    other = life("died", 4, ("node1",))
    assert decide([other, life(cause, 5, ("node2",))], 3, False).exclude == ()


@pytest.mark.parametrize("cause", sorted(policy.FAILURES))
def test_same_failure_at_the_same_update_ends_the_run(cause: policy.Cause) -> None:
    assert decide([life(cause), life(cause)], 3, False) == Decision(False, (), "the same failure twice at update 5")
    between = [life(cause), life("stopped", 9), life(cause)]
    assert not decide(between, 3, False).again
    assert decide([life(cause, 4), life(cause)], 3, False).again is (cause not in policy.PASSING)


def test_failures_are_counted_and_other_requeues_are_not() -> None:
    failures = [life("hang", update) for update in (1, 2, 3)]
    assert decide(failures, 3, False).again
    assert decide([*failures, life("died", 4)], 3, False).why == "4 failures are more than slurm.max_requeues=3"
    assert decide([life("stopped", 1), life("killed", 2), life("stopped", 3), life("hang", 9)], 1, False).again
    assert not decide([life("hang")], 0, False).again


def test_lives_of_another_job_do_not_count() -> None:
    """Whoever submits a run anew has put something right."""
    before = replace(life("hang"), job="16")
    assert decide([before, life("hang")], 1, False).again


def test_time_limit_goes_on_as_long_as_it_gets_somewhere() -> None:
    assert decide([life("stopped")], 0, False) == Decision(True, (), "from update 5")
    assert decide([life("stopped", 5), life("stopped", 6)], 0, False).again
    stuck = decide([life("stopped", 5), life("stopped", 5)], 3, False)
    assert stuck == Decision(False, (), "a whole life brought no update: it is still at 5; give more time")


def test_preemption_without_grace_is_no_failure_and_nobodys_fault() -> None:
    lives = [life("killed", update, ("node2",)) for update in range(1, 30)]
    assert decide(lives, 0, False) == Decision(True, (), "from its newest checkpoint")
    assert decide([*lives, life("died", 30)], 1, False).again


def test_job_that_is_ended_from_outside_over_and_over_stops_where_it_comes_no_further() -> None:
    assert decide([life("killed")], 2, False).again
    assert decide([life("killed"), life("killed")], 2, False).again
    assert not decide([life("killed")] * 3, 2, False).again
    up_and_down = [life("killed", update) for update in (5, 3, 4)]
    assert not decide(up_and_down, 2, False).again
    assert decide([*up_and_down[:2], life("killed", 6)], 2, False).again


def test_unfit_nodes_are_left_out_once_if_that_is_asked_for() -> None:
    unfit = life("gate", 0, ("node2",))
    assert not decide([unfit], 3, exclude_unfit=False).again
    assert decide([unfit], 3, exclude_unfit=True) == Decision(True, ("node2",), "once, without node2")
    assert not decide([unfit, unfit], 3, exclude_unfit=True).again
    assert not decide([life("gate", 0, NODES)], 3, exclude_unfit=True).again
    assert not decide([life("gate", 0)], 3, exclude_unfit=True).again


def test_nodes_at_fault_add_up() -> None:
    lives = [replace(life("died"), excluded=("a",)), life("hang"), replace(life("died"), excluded=("b", "a"))]
    assert policy.excluded(lives) == ("a", "b")


def test_nodes_at_fault_are_left_out_as_far_as_enough_others_remain_the_newest_first() -> None:
    up = {"a", "b", "c", "d"}
    assert policy.bearable(("a", "b"), up, 2) == ("a", "b")
    assert policy.bearable(("a", "b", "c"), up, 2) == ("b", "c")
    assert policy.bearable(("a", "gone"), {"b"}, 1) == ("a", "gone")
    assert policy.bearable(("a",), {"a"}, 1) == ()


def test_cause_has_to_be_known() -> None:
    with pytest.raises(ValueError, match="not known"):
        decide([life(None)], 3, False)


UPDATES = 6
ENDINGS = st.tuples(st.sampled_from(policy.CAUSES), st.integers(0, UPDATES), st.sets(st.integers(0, 7)))


@settings(max_examples=1000, deadline=None)
@given(st.data(), st.integers(0, 4), st.integers(1, 4), st.integers(0, 2))
def test_no_sequence_of_causes_goes_on_for_ever_or_leaves_no_node(
    endings: st.DataObject, max_requeues: int, nodes: int, spare: int
) -> None:
    """Whatever ends each life, at whatever update, whichever nodes are blamed: the job ends, and always has nodes."""
    partition = [f"n{number}" for number in range(nodes + spare)]
    lives: list[Life] = []
    for attempt in range(200):
        cause, update, blamed = endings.draw(ENDINGS)
        out = policy.bearable(policy.excluded(lives), partition, nodes)
        left = [node for node in partition if node not in out]
        assert len(left) >= nodes
        used = tuple(left[:nodes])
        culprits = tuple(used[number] for number in sorted(blamed) if number < nodes)
        ended = Life(attempt, "17", used, cause, update, culprits)
        decision = decide([*lives, ended], max_requeues, exclude_unfit=True)
        assert set(decision.exclude) <= set(culprits)
        assert nodes == 1 or len(decision.exclude) < nodes
        lives.append(replace(ended, excluded=decision.exclude))
        if not decision.again:
            break
    # Each life is a failure, comes further than all before, is one of a few in a row that do not, or was just saved.
    assert len(lives) <= 2 * (UPDATES + 2 + max_requeues) * max(2, max_requeues)


@given(st.lists(st.sampled_from(policy.CAUSES), min_size=40, max_size=40), st.integers(0, 4), st.booleans())
def test_run_that_gets_nowhere_ends_whatever_happens_to_it(
    causes: list[policy.Cause], max_requeues: int, exclude_unfit: bool
) -> None:
    """Forty lives, all at the same update: the job has ended before."""
    lives: list[Life] = []
    for attempt, cause in enumerate(causes):
        lives.append(life(cause, 5, ("node2",), attempt))
        if not decide(lives, max_requeues, exclude_unfit).again:
            break
    assert len(lives) < 40
