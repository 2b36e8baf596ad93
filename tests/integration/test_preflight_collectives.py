"""The collective test with real processes over gloo, each a node of its own, with faults planted in one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from preflight import pairs, ranks
from tests import standin


def judged(run: Path, nodes: int) -> list[tuple[str, str, str]]:
    found = pairs.judge_ranks(ranks.read(run / "preflight/0"), nodes, {rank: f"node{rank}" for rank in range(nodes)})
    return [(node, finding.check, finding.state) for node, finding in found]


def test_four_healthy_nodes(tmp_path: Path) -> None:
    standin.run_ranks(tmp_path, 4, {})
    assert judged(tmp_path, 4) == [("node0", "collective.values", "pass")]
    met = [step["peer"] for report in ranks.read(tmp_path / "preflight/0") for step in report.stage("pair")]
    assert sorted(met) == sorted(["node0", "node1", "node2", "node3"] * 2)


@pytest.mark.parametrize(
    ("code", "check", "state"),
    [
        (standin.SLOW_NODE, "collective.pair", "fail"),
        pytest.param(standin.DEAF_IN_PAIRS, "collective.pair", "fail", marks=pytest.mark.slow),
        pytest.param(standin.WRONG_VALUES, "collective.values", "fail", marks=pytest.mark.slow),
        pytest.param(standin.KILLED, "collective.values", "fail", marks=pytest.mark.slow),
        pytest.param(standin.STUCK, "collective.values", "silent", marks=pytest.mark.slow),
        pytest.param(standin.LATE_CLOCK, "host.clock", "fail", marks=pytest.mark.slow),
    ],
    ids=["slow", "deaf", "wrong", "killed", "stuck", "clock"],
)
def test_one_node_is_at_fault(tmp_path: Path, code: str, check: str, state: str) -> None:
    standin.run_ranks(tmp_path, 3, {1: code}, seconds=45)
    assert judged(tmp_path, 3) == [("node1", check, state)]


def test_a_rank_that_never_joins_is_named_and_costs_its_deadline_only(tmp_path: Path) -> None:
    standin.run_ranks(tmp_path, 3, {}, absent=(2,), seconds=24)
    assert judged(tmp_path, 3) == [("node2", "collective.join", "silent")]
