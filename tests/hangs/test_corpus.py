"""The corpus of hangs: large enough, judged well enough, and every rule of a verdict is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurm import finding, rules
from slurm.evidence import Rank, Seen
from tests.bench import hangs_bench
from tests.bench.hangs_bench import Score, score
from tests.hangs.cases import CORPUS, ON_GPUS, PLANS, Case, read_all

LEAST = 0.95
LAST = rules.cannot_tell


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return read_all(CORPUS)


@pytest.fixture(scope="module")
def corpus(cases: list[Case]) -> Score:
    return score(cases)


def test_it_is_large_enough_and_mostly_of_real_runs(cases: list[Case]) -> None:
    hangs = [case for case in cases if not case.label.healthy]
    real = [case for case in hangs if not case.label.composed]
    healthy = [case for case in cases if case.label.healthy]
    assert len(real) >= 40
    assert len(healthy) >= 12
    assert {case.label.kind for case in hangs} == set(finding.Kind.__args__) - {"autotuning", "compiling"}
    assert {case.name for case in cases if not case.label.composed} == {plan.name for plan in PLANS} | {*ON_GPUS}
    assert sum(path.stat().st_size for path in CORPUS.rglob("*.json")) < 5_000_000
    assert {8, 4, 3, 2} <= {case.label.world for case in real}


def test_verdicts_are_good_enough(corpus: Score) -> None:
    assert hangs_bench.good_enough(corpus), hangs_bench.report("corpus", corpus)


def test_no_innocent_rank_is_blamed_and_nothing_healthy_is_flagged(corpus: Score) -> None:
    assert corpus.innocent_blamed == 0
    assert corpus.flagged == 0


@pytest.mark.parametrize("rule", [rule for rule in rules.RULES if rule is not LAST], ids=lambda rule: rule.__name__)
def test_without_one_rule_the_score_falls(
    rule: Callable[..., object], cases: list[Case], corpus: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tuple(one for one in rules.RULES if one is not rule)
    monkeypatch.setattr(rules, "RULES", table)
    assert score(cases, table).points < corpus.points


def test_without_stacks_or_without_rings_no_innocent_rank_is_blamed(cases: list[Case]) -> None:
    """Less evidence makes verdicts poorer, not wrong."""
    for blind in (_without_stacks, _without_rings):
        found = score([blind(case) for case in cases if not case.label.healthy])
        wrong = [row for row in found.rows if row.wrong]
        assert not wrong, [(row.case.name, row.said.sentence) for row in wrong]


def test_no_text_of_the_machine_that_made_it() -> None:
    for path in CORPUS.rglob("*.json"):
        text = path.read_text()
        assert str(Path(__file__).parents[2]) not in text, path
        assert "/tmp/" not in text, path


def test_r30_r31_r34_r46_of_real_runs(corpus: Score) -> None:
    said = {row.case.name: row.said for row in corpus.rows}
    assert "left forward of update" in said["missing-pack"].sentence
    assert "while the others were at all_gather" in said["missing-pack"].sentence
    assert "1 collective behind" in said["missing-sleep-reduce"].sentence
    assert "its thread metrics holds the interpreter lock" in said["lock-thread"].sentence
    assert not said["ok-save"].ends
    assert not said["ok-search-late"].ends


def _without_stacks(case: Case) -> Case:
    return _changed(case, lambda rank: replace(rank, rounds=tuple(map(_bare, rank.rounds))))


def _without_rings(case: Case) -> Case:
    return _changed(case, lambda rank: replace(rank, collectives=()))


def _bare(seen: Seen) -> Seen:
    return replace(seen, stack=None, process=None)


def _changed(case: Case, change: Callable[[Rank], Rank]) -> Case:
    return replace(case, nodes=tuple(replace(node, ranks=tuple(map(change, node.ranks))) for node in case.nodes))
