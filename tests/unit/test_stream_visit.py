"""What a visit of a block costs the host is counted, and does not grow unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefix_train.stream.engine import Streamed
from tests import tape, visits

RECORDED = "recorded launches"
VISITS = 2 * visits.MODEL["num_hidden_layers"]  # type: ignore[operator]


@pytest.fixture(scope="module")
def update(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[[], None], Streamed]:
    run, root = visits.small(tmp_path_factory.mktemp("small") / "store")
    run()
    return run, root


def test_a_visit_costs_no_more_than_it_did(update: tuple[Callable[[], None], Streamed]) -> None:
    """Operations on a CPU: its dequantising is a chain of them, on CUDA one kernel."""
    run, root = update
    before = root.ring.figures.visits
    counts = visits.count(run)
    assert root.ring.figures.visits - before == 2 * VISITS
    beside = counts.total("operations") - counts.operations["dequantising"]
    assert beside / VISITS <= 375, visits.table(counts, VISITS)
    assert counts.total("calls") / VISITS <= 2350, visits.table(counts, VISITS)


def test_all_parts_are_seen(update: tuple[Callable[[], None], Streamed]) -> None:
    """Should a part be renamed, its counts would be another's."""
    counts = visits.count(update[0])
    assert {part for part in visits.PARTS if not counts.calls[part]} == {RECORDED}, visits.table(counts, VISITS)


def test_recorded_launches_leave_the_host_little_to_do(tmp_path: Path) -> None:
    run, _ = visits.small(tmp_path / "store", visits.Nothing(), graphs="on")
    for _ in range(3):
        run()
    counts = visits.count(run)
    assert counts.calls[RECORDED] > 0
    assert counts.total("operations") / VISITS <= 10, visits.table(counts, VISITS)
    assert counts.total("calls") / VISITS <= 270, visits.table(counts, VISITS)


def test_a_layout_that_comes_once_is_recorded_where_a_slot_is_used_again(tmp_path: Path) -> None:
    """Of each slot, up and down, the first visit is an ordinary one; so is that of the lowest block, which ends it."""
    recorder = tape.Recorder()
    run, root = visits.small(tmp_path / "store", recorder, graphs="on")
    run()
    slots = len(root.ring.slots)
    assert len(recorder.tapes) == 2 * slots
    assert recorder.plays == VISITS - 2 * slots - 1
    assert recorder.rooms == 2
    run()
    assert recorder.plays == 2 * VISITS - 2 * slots - 1
