"""Who is tested with whom, and what the ranks' answers say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from preflight.pairs import RankReport, judge_ranks, rounds

STAGES = ("store", "join", "group", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "clock")


def report(rank: int, *pairs: dict[str, Any], until: str = "done", **changes: Any) -> RankReport:
    """A rank that came to `until`. A change of a stage's name replaces what that stage found."""
    found: dict[str, Any] = {"join": {"missing": []}, "group": {"backend": "gloo"}, "all_gather": {"wrong": []}}
    found |= {name: {"ok": True} for name in ("all_reduce", "reduce_scatter", "broadcast")} | {"clock": {"wall": 1e6}}
    stages = {name: changes.pop(name) for name in STAGES if name in changes}
    steps: list[dict[str, Any]] = []
    for name in STAGES:
        steps.append({"begin": name})
        if name == until:
            return RankReport(rank, f"node{rank}", tuple(steps), **changes)
        steps.append({"stage": name, **found.get(name, {}), **stages.get(name, {})})
    for pair in pairs:
        steps += [{"begin": "pair"}, {"stage": "pair", **pair}]
    return RankReport(rank, f"node{rank}", (*steps, {"stage": "done"}), **changes)


def cluster(speeds: dict[tuple[int, int], float | str], nodes: int) -> list[RankReport]:
    """Ranks, one a node, whose pairs reach `speeds`, GiB/s, or fail with an error; 1.0 unless given."""
    said: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(nodes)}
    for number, pairs in enumerate(rounds(nodes)):
        for first, second in pairs:
            speed = speeds.get((min(first, second), max(first, second)), 1.0)
            result = {"error": speed} if isinstance(speed, str) else {"gib_s": speed}
            said[first].append({"round": number, "peer": f"node{second}", **result})
            said[second].append({"round": number, "peer": f"node{first}", **result})
    return [report(rank, *said[rank]) for rank in range(nodes)]


def judged(reports: list[RankReport], world: int | None = None, floor: float = 0.0) -> list[tuple[str, str, str]]:
    world = len(reports) if world is None else world
    node_of = {rank: f"node{rank}" for rank in range(world)}
    return [(node, f.check, f.state) for node, f in judge_ranks(reports, world, node_of, floor)]


@pytest.mark.parametrize("nodes", range(1, 12))
def test_every_node_meets_two_others(nodes: int) -> None:
    schedule = rounds(nodes)
    for pairs in schedule:
        named = [node for pair in pairs for node in pair]
        assert len(named) == len(set(named))
    met = Counter(node for pairs in schedule for pair in pairs for node in pair)
    everything = [frozenset(pair) for pairs in schedule for pair in pairs]
    assert len(everything) == len(set(everything))
    assert set(met.values()) <= {2} if nodes > 2 else sum(met.values()) == (2 if nodes == 2 else 0)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 64])
def test_a_healthy_cluster_passes(nodes: int) -> None:
    assert judged(cluster({}, nodes)) == [("node0", "collective.values", "pass")]


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
@pytest.mark.parametrize("speed", [0.05, "timed out"])
def test_a_node_that_fails_twice_is_named_and_nobody_else(nodes: int, speed: float | str) -> None:
    slow = {pair: speed for pairs in rounds(nodes) for pair in (tuple(sorted(p)) for p in pairs) if 1 in pair}
    assert judged(cluster(slow, nodes)) == [("node1", "collective.pair", "fail")]  # type: ignore[arg-type]


def test_one_slow_pair_is_a_link() -> None:
    assert judged(cluster({(1, 2): 0.05}, 6)) == [(n, "collective.link", "fail") for n in ("node1", "node2")]


def test_two_nodes_have_one_pair_and_a_floor() -> None:
    assert judged(cluster({(0, 1): 0.4}, 2)) == [("node0", "collective.values", "pass")]
    assert {node for node, _, _ in judged(cluster({(0, 1): 0.4}, 2), floor=1.0)} == {"node0", "node1"}


def test_a_rank_without_an_answer_is_named_with_its_node() -> None:
    waiting = [report(rank, until="group", join={"missing": [2]}) for rank in (0, 1, 3)]
    waiting = [RankReport(r.rank, r.node, r.steps[:4]) for r in waiting]
    assert judged(waiting, 4) == [("node2", "collective.join", "silent")]


def test_a_rank_that_cannot_reach_rank_0() -> None:
    reports = [report(rank) for rank in (0, 1, 2)] + [report(3, until="store", status=1, error="timed out")]
    assert judged(reports) == [("node3", "collective.join", "fail")]


def test_a_killed_rank_is_the_cause_of_what_the_others_raise() -> None:
    reports = [report(rank, until="all_reduce", status=1, error="Connection closed by peer") for rank in (0, 2)]
    reports.append(report(1, until="all_reduce", status=-9, error="killed"))
    assert judged(reports) == [("node1", "collective.values", "fail")]


def test_the_rank_behind_is_to_blame_and_those_that_wait_are_not() -> None:
    reports = [report(rank, until="all_gather", status=1, error="timed out") for rank in (0, 2)]
    reports.append(report(1, until="all_reduce", status=None, error="did not end in time"))
    assert judged(reports) == [("node1", "collective.values", "silent")]


def test_where_all_wait_alike_the_test_is_broken_and_nobody_is_blamed() -> None:
    reports = [report(rank, until="all_reduce", status=1, error="timed out") for rank in range(4)]
    assert judged(reports) == [("the job", "collective.values", "broken")]


def test_whose_numbers_are_wrong() -> None:
    others = [report(rank, all_gather={"wrong": [1]}, all_reduce={"ok": False}) for rank in (0, 2, 3)]
    assert judged([*others, report(1)]) == [("node1", "collective.values", "fail")]
    alone = [report(rank) for rank in (0, 1, 3)] + [report(2, all_gather={"wrong": [0, 1, 3]})]
    assert [node for node, _, _ in judged([*alone[:3], report(2, broadcast={"ok": False})])] == ["node2"]


def test_a_clock_behind_the_others() -> None:
    reports = [report(0), report(1), report(2, clock={"wall": 1e6 - 30})]
    assert judged(reports) == [("node2", "host.clock", "fail")]
