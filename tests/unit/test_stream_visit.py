"""What a visit of a block costs the host is counted, and does not grow unnoticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefix_train.stream.engine import Streamed
from tests import visits

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
    assert all(counts.calls[part] > 0 for part in visits.PARTS), visits.table(counts, VISITS)
