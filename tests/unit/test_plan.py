"""Plans: every example once, exactly as it is alone, under the cap, the same number of packs for every rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from configs.schema import PackConfig
from prefix_train import plan as planning
from prefix_train.budget import Cost
from prefix_train.layout import Layout
from prefix_train.packing import EMPTY, Pack, Packer, pack_of
from prefix_train.plan import Cursor, Plan, RunPlan, plan_epoch, plan_evaluation, plan_run, predicted_time, totals
from prefix_train.plan_summary import describe, summary
from prefix_train.tree import Forest, build_forest
from tests.bench.plan_bench import two_levels

Sequences = list[tuple[int, ...]]
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
examples = st.lists(tokens, min_size=1, max_size=20)


def forest_of(sequences: Sequences, min_shared: int = 1) -> Forest:
    return build_forest([np.array(sequence, np.int64) for sequence in sequences], min_shared)


def planned(forest: Forest, ranks: int = 2, seed: int = 0, epoch: int = 0, **options: Any) -> Plan:
    return plan_epoch(forest.lengths, forest, PackConfig(**options), ranks, seed, epoch)


def real(plan: Plan) -> list[Pack]:
    return [pack for pack in plan.packs if pack.members]


def groups(plan: Plan) -> list[list[int]]:
    """The examples of each update."""
    return [sorted(chain.from_iterable(pack.members for rank in update for pack in rank)) for update in plan.updates]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sequences, Plan]:
    sequences = draw(examples)
    ranks, min_shared = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    longest = max(map(len, sequences))
    options: dict[str, Any] = {
        "mode": draw(st.sampled_from(["shared", "shared", "standalone"])),
        "max_positions": longest + draw(st.integers(0, 25)),
        "min_shared": min_shared,
    }
    if draw(st.booleans()):
        options["packs_per_update"] = ranks * draw(st.integers(1, 3))
    else:
        options["examples_per_update"] = draw(st.integers(1, 12))
    return sequences, planned(forest_of(sequences, min_shared), ranks, draw(st.integers(0, 9)), **options)


@given(cases())
def test_every_example_exactly_once(case: tuple[Sequences, Plan]) -> None:
    sequences, plan = case
    assert Counter(chain.from_iterable(groups(plan))) == Counter(range(len(sequences)))


@given(cases())
def test_every_path_in_a_pack_spells_its_example(case: tuple[Sequences, Plan]) -> None:
    sequences, plan = case
    for pack in real(plan):
        segments = [
            sequences[example][start : start + length]
            for (example, start), length in zip(pack.origin, pack.lengths, strict=True)
        ]
        assert all(len(segment) == length for segment, length in zip(segments, pack.lengths, strict=True))
        for member, path in zip(pack.members, pack.paths, strict=True):
            assert sum((segments[index] for index in path), ()) == sequences[member]
            assert [pack.parents[index] for index in path] == [-1, *path[:-1]]
        assert {example for example, _ in pack.origin} <= set(pack.members)


@given(cases())
def test_packs_are_what_a_layout_takes_and_keep_the_cap(case: tuple[Sequences, Plan]) -> None:
    sequences, plan = case
    for pack in real(plan):
        layout = Layout.from_tree(pack.lengths, pack.parents)
        assert layout.total == pack.positions <= plan.pack.max_positions
        assert pack.logical == sum(len(sequences[member]) for member in pack.members)


@given(cases())
def test_a_shared_segment_saves_enough_in_its_own_pack(case: tuple[Sequences, Plan]) -> None:
    _, plan = case
    for pack in real(plan):
        children, ended = Counter(pack.parents), {path[-1] for path in pack.paths}
        for index, length in enumerate(pack.lengths):
            if children[index]:
                assert length * (children[index] + (index in ended) - 1) >= plan.pack.min_shared


@given(cases())
def test_pairs_are_those_of_the_mask(case: tuple[Sequences, Plan]) -> None:
    _, plan = case
    for pack in real(plan):
        above: list[set[int]] = []
        for index, parent in enumerate(pack.parents):
            above.append({index} | (above[parent] if parent >= 0 else set()))
        segment = [index for index, length in enumerate(pack.lengths) for _ in range(length)]
        assert pack.pairs == sum(
            key <= query and segment[key] in above[segment[query]]
            for query in range(pack.positions)
            for key in range(pack.positions)
        )


def same_number_for_every_rank(plan: Plan) -> bool:
    return all(len(update) == plan.ranks and len({len(rank) for rank in update}) == 1 for update in plan.updates)


@given(cases())
def test_r15_every_rank_has_as_many_packs_in_every_update(case: tuple[Sequences, Plan]) -> None:
    sequences, plan = case
    assert same_number_for_every_rank(plan)
    forest = forest_of(sequences)
    evaluation = plan_evaluation(forest.lengths, forest, plan.pack, plan.ranks)
    assert same_number_for_every_rank(evaluation)
    assert len(evaluation.updates) == 1
    assert groups(evaluation) == [list(range(len(sequences)))]


def test_r15_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs dealt out as they come, without empty ones: the last update and the evaluation end early on a rank."""

    def dealt_out(self: Any, packs: list[Pack]) -> planning.Update:
        return tuple(tuple(packs[rank :: self._ranks]) for rank in range(self._ranks))

    monkeypatch.setattr(planning._Planner, "_balance", dealt_out)
    forest = forest_of([(i, *[7] * 9) for i in range(3)])
    assert not same_number_for_every_rank(planned(forest, max_positions=10, packs_per_update=2))
    evaluation = plan_evaluation(forest.lengths, forest, PackConfig(max_positions=10), 2)
    assert not same_number_for_every_rank(evaluation)


def test_r15_an_update_with_fewer_examples_than_ranks_has_empty_packs() -> None:
    forest = forest_of([(1,) * 20, (2,) * 20])
    plan = planned(forest, ranks=4, max_positions=64, examples_per_update=2)
    assert [rank for rank in plan.updates[0] if rank == (EMPTY,)] == [(EMPTY,)] * 2
    assert summary(plan)["empty_packs"] == 2


@given(cases(), st.integers(1, 4))
def test_r14_totals_depend_on_the_examples_of_an_update_alone(case: tuple[Sequences, Plan], ranks: int) -> None:
    sequences, plan = case
    targets = [len(sequence) % 3 for sequence in sequences]
    for update, members in zip(plan.updates, groups(plan), strict=True):
        expected = planning.Totals(len(members), sum(targets[member] for member in members))
        assert totals(update, targets) == expected
        assert totals(regrouped(update, ranks), np.array(targets)) == expected


def regrouped(update: planning.Update, ranks: int) -> planning.Update:
    """The same examples, each alone in its pack, on another number of ranks, one after the other."""
    packs = [
        planning.standalone(member, sum(pack.lengths[index] for index in path))
        for rank in update
        for pack in rank
        for member, path in zip(pack.members, pack.paths, strict=True)
    ]
    packs += [EMPTY] * (-len(packs) % ranks)
    return tuple(tuple(packs[rank::ranks]) for rank in range(ranks))


def test_r14_fails_without_fix() -> None:
    """The public fault: the denominator is the mean over packs of each pack's own count."""
    plan = planned(forest_of([(1, 2), (1, 3), (1, 4), (2, 2, 2)]), max_positions=5, packs_per_update=2)
    update = plan.updates[0]

    def per_pack(update: planning.Update) -> float:
        counts = [len(pack.members) for rank in update for pack in rank if pack.members]
        return sum(counts) / len(counts)

    assert per_pack(update) != per_pack(regrouped(update, 2))
    assert totals(update, [1] * 4) == totals(regrouped(update, 2), [1] * 4)


@given(examples, st.integers(1, 4), st.integers(1, 12))
def test_examples_of_an_update_depend_neither_on_ranks_nor_on_mode(sequences: Sequences, ranks: int, size: int) -> None:
    forest = forest_of(sequences)
    options = {"max_positions": 24, "examples_per_update": size}
    expected = groups(planned(forest, 1, **options))
    assert groups(planned(forest, ranks, **options)) == expected
    assert groups(planned(forest, ranks, mode="standalone", **options)) == expected
    assert [len(group) for group in expected[:-1]] == [size] * (len(expected) - 1)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = [item for item in rest if item not in others]
            for smaller in partitions(left):
                yield [[first, *others], *smaller]


@settings(max_examples=60)
@given(st.lists(tokens, min_size=1, max_size=6), st.integers(0, 12))
def test_bound_and_plan_against_all_partitions(sequences: Sequences, spare: int) -> None:
    """No way to form packs goes below the bound; the plan is a way, and on such sizes at most half as much again."""
    cap = max(map(len, sequences)) + spare

    def size(group: list[int]) -> int:
        return len({sequences[i][:end] for i in group for end in range(1, len(sequences[i]) + 1)})

    ways = [way for way in partitions(list(range(len(sequences)))) if all(size(group) <= cap for group in way)]
    fewest, least = min(map(len, ways)), min(sum(map(size, way)) for way in ways)
    plan = planned(forest_of(sequences), ranks=1, max_positions=cap, packs_per_update=1, min_shared=1)
    assert plan.bound[0] <= fewest <= len(real(plan))
    assert plan.bound[1] <= least <= sum(pack.positions for pack in real(plan)) <= 1.5 * least


@given(examples, st.integers(0, 25))
def test_bound_falls_as_the_cap_grows(sequences: Sequences, spare: int) -> None:
    packer = Packer(forest_of(sequences), 1)
    bound = packer.bound(packer.select(range(len(sequences))))
    cap = max(map(len, sequences)) + spare
    packs, positions = bound.at(cap)
    assert bound.at(cap + 1)[0] <= packs
    assert bound.at(cap + 1)[1] <= positions


def test_examples_that_share_a_prefix_meet() -> None:
    sequences = [(kind,) * 40 + (9, item, kind) for item in range(8) for kind in range(4)]
    plan = planned(forest_of(sequences, 16), max_positions=64, packs_per_update=2)
    assert len(real(plan)) == 4
    for pack in real(plan):
        assert len({sequences[member][0] for member in pack.members}) == 1


def test_a_group_is_split_where_that_repeats_less_than_another_pack_would() -> None:
    """Under a long root, groups just over half of what is left would leave every pack half empty."""
    root = (1,) * 500
    sequences = [(*root, 2, group, group, *[group] * 9, item) for group in range(8) for item in range(52)]
    forest = forest_of(sequences)
    plan = planned(forest, ranks=1, max_positions=600, packs_per_update=1, min_shared=4)
    assert len(real(plan)) <= plan.bound[0] + 1
    assert summary(plan)["waste"]["positions"] < 0.1


def test_roots_are_not_repeated_to_fill_packs() -> None:
    sequences = [(group,) * 30 + (item,) for group in range(6) for item in range(10)]
    plan = planned(forest_of(sequences, 16), ranks=1, max_positions=60, packs_per_update=1)
    assert summary(plan)["waste"]["positions"] == 0


def test_seed_and_epoch_change_who_meets_and_the_order() -> None:
    rng = np.random.default_rng(0)
    forest = forest_of([(*[1] * 30, *rng.integers(0, 99, rng.integers(5, 30)).tolist()) for _ in range(60)])
    options: dict[str, Any] = {"max_positions": 128, "packs_per_update": 2}

    def meetings(plan: Plan) -> set[tuple[int, int]]:
        return {pair for pack in real(plan) for pair in combinations(sorted(pack.members), 2)}

    first, again = planned(forest, **options), planned(forest, **options)
    assert first.digest == again.digest
    assert first.updates == again.updates
    for other in (planned(forest, epoch=1, **options), planned(forest, seed=1, **options)):
        assert other.digest != first.digest
        assert len(meetings(other) & meetings(first)) < 0.5 * len(meetings(first))
        assert groups(other) != groups(first)


def test_digest_sees_every_part_of_a_plan() -> None:
    plan = planned(forest_of([(1, 1, 1, 2), (1, 1, 1, 3), (4,), (5, 5)]), max_positions=8, packs_per_update=2)
    pack = real(plan)[0]
    changed = [
        replace(plan, updates=tuple(tuple(reversed(update)) for update in plan.updates)),
        replace(plan, ranks=1),
        replace(plan, seed=5),
        replace(plan, epoch=5),
        replace(plan, pack=replace(plan.pack, min_shared=5)),
    ]
    for field, value in (
        ("members", pack.members[::-1]),
        ("lengths", (9,)),
        ("parents", (7,)),
        ("origin", ((3, 3),)),
        ("paths", ((7,),)),
    ):
        other = replace(pack, **{field: value})
        updates = tuple(tuple(tuple(other if p is pack else p for p in r) for r in u) for u in plan.updates)
        changed.append(replace(plan, updates=updates))
    assert len({plan.digest, *(other.digest for other in changed)}) == 1 + len(changed)


def test_plans_are_the_same_on_every_machine() -> None:
    """A plan that was computed when this test was written: random bits of PCG64, no library's shuffle."""
    sequences = [(*[1] * 20, *[i] * (1 + i % 5)) for i in range(12)]
    plan = planned(forest_of(sequences, 16), max_positions=32, packs_per_update=2, seed=3, epoch=1)
    assert [pack.members for pack in plan.packs] == EXPECTED


EXPECTED: list[tuple[int, ...]] = [(3, 8, 2, 0), (7, 6, 1, 10, 5), (4, 11), (9,)]


@given(cases())
def test_ranks_are_balanced_by_predicted_time(case: tuple[Sequences, Plan]) -> None:
    """Packs that run at once are neighbours in cost, and no rank's sum is more than one pack above another's."""
    _, plan = case
    for update in plan.updates:
        costs = [[plan.cost.of(pack.positions, pack.pairs) for pack in rank] for rank in update]
        at_once = list(zip(*costs, strict=True))
        for earlier, later in pairwise(at_once):
            assert min(earlier) >= max(later)
        sums = [sum(rank) for rank in costs]
        assert max(sums) - min(sums) <= max(chain.from_iterable(costs)) + 1e-9


def test_balance_counts_pairs_and_not_positions_alone() -> None:
    deep, wide = (1,) * 90, [(k,) * 11 for k in range(2, 11)]
    forest = forest_of([deep, *wide])
    plan = plan_epoch(
        forest.lengths, forest, PackConfig(max_positions=100, packs_per_update=2), 1, 0, 0, cost=Cost(1.0, 1.0)
    )
    first, second = plan.updates[0][0]
    assert 0 in first.members
    assert first.positions < second.positions


def test_an_update_given_in_examples_is_spread_evenly_over_the_ranks() -> None:
    sequences = [(*[1] * 200, *[item] * 10) for item in range(64)]
    plan = planned(forest_of(sequences, 16), ranks=8, max_positions=1000, examples_per_update=64)
    (update,) = plan.updates
    assert sorted(pack.positions for rank in update for pack in rank) == [280] * 8
    assert predicted_time(update, plan.cost) == pytest.approx(280, rel=0.01)


@pytest.mark.parametrize("mode", ["shared", "standalone"])
def test_an_example_that_no_pack_holds_is_named(mode: str) -> None:
    forest = forest_of([(1, 2), (*[3] * 11,), (*[4] * 12,)])
    with pytest.raises(UserError, match=r"train.jsonl:2: 11 tokens do not fit into pack.max_positions=10 \(2 of 3"):
        plan_epoch(
            forest.lengths,
            forest,
            PackConfig(mode=mode, max_positions=10, packs_per_update=1),  # type: ignore[arg-type]
            1,
            0,
            0,
            sources=["train.jsonl:1", "train.jsonl:2", "train.jsonl:3"],
        )


def test_a_prefix_that_no_pack_holds_is_named() -> None:
    forest = forest_of([(9,), *[(*[1] * 20, item) for item in range(5)]], 16)
    with pytest.raises(UserError, match="example 1: its shared beginning of 20 tokens do not fit"):
        planned(forest, max_positions=19, packs_per_update=2)
    with pytest.raises(UserError, match="example 1: 21 tokens do not fit"):
        planned(forest, max_positions=20, packs_per_update=2)
    with pytest.raises(UserError, match="example 1: 21 tokens"):
        plan_evaluation(forest.lengths, forest, PackConfig(max_positions=20), 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give one of"),
        ({"packs_per_update": 2, "examples_per_update": 2}, "give one of"),
        ({"packs_per_update": 3}, "no multiple of the 2 ranks"),
    ],
)
def test_options_that_make_no_plan_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        planned(forest_of([(1, 2)]), max_positions=10, **options)


def test_no_examples_are_refused() -> None:
    with pytest.raises(UserError, match="no examples"):
        plan_evaluation([], build_forest([], 1), PackConfig(), 1)


def test_lengths_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="not those of the forest"):
        plan_epoch([1, 2], forest_of([(1, 2)]), PackConfig(packs_per_update=1), 1, 0, 0)


def run_of(updates: int | None = None, epochs: float | None = None) -> RunPlan:
    forest = forest_of([(*[1] * 20, i, i) for i in range(23)], 16)
    config = PackConfig(max_positions=26, packs_per_update=2)
    return plan_run(forest.lengths, forest, config, 2, seed=5, updates=updates, epochs=epochs)


def test_a_run_goes_on_with_the_next_epoch() -> None:
    run = run_of(updates=10)
    steps = list(run.walk())
    per_epoch = len(run.epoch(0).updates)
    assert [(step.cursor.epoch, step.cursor.update) for step in steps] == [divmod(u, per_epoch) for u in range(10)]
    assert [step.cursor.number for step in steps] == list(range(10))
    assert steps[per_epoch].update == run.epoch(1).updates[0] != run.epoch(0).updates[0]


def test_a_run_resumes_at_any_cursor() -> None:
    steps = list(run_of(updates=10).walk())
    for done, step in enumerate(steps, 1):
        rest = list(run_of(updates=10).walk(step.after))
        assert [other.cursor for other in rest] == [other.cursor for other in steps[done:]]
        assert [other.update for other in rest] == [other.update for other in steps[done:]]
    assert list(run_of(updates=10).walk(Cursor(10, 3, 1))) == []


@pytest.mark.parametrize(("epochs", "times"), [(1.0, 1.0), (2.0, 2.0), (0.5, 0.5), (1.25, 1.25)])
def test_a_run_of_epochs(epochs: float, times: float) -> None:
    run = run_of(epochs=epochs)
    per_epoch = len(run.epoch(0).updates)
    assert per_epoch == 4
    assert run.total == len(list(run.walk())) == int(np.ceil(per_epoch * times))


def test_a_run_needs_one_length() -> None:
    for updates, epochs in ((None, None), (1, 1.0)):
        with pytest.raises(UserError, match=r"give one of train\.updates and train\.epochs"):
            run_of(updates, epochs)


def test_summary_counts_what_the_packs_hold() -> None:
    """One prefix of 640 and 80 continuations of 10: the figures of the method, a hundred times smaller."""
    sequences = [(*[1] * 640, *[2 + item] * 10) for item in range(80)]
    plan = planned(forest_of(sequences, 16), ranks=1, max_positions=1440, packs_per_update=1)
    s = summary(plan)
    assert (s["packs"], s["positions"], s["logical_tokens"]) == (1, 1440, 52_000)
    assert s["visible_pairs"]["packed"] == 640 * 641 // 2 + 80 * (55 + 6400)
    assert s["visible_pairs"]["standalone"] == 80 * (650 * 651 // 2)
    assert s["waste"] == {"packs": 0, "positions": 0}
    assert s["longest"][0] == {"source": "example 0", "tokens": 650}
    assert sum(s["histogram"]["examples"]) == 80
    text = describe(plan)
    assert "1,440 for 52,000 logical tokens: 36.1 times fewer" in text
    assert s["digest"][:16] in text


def test_the_issue_s_arithmetic_of_a_pack() -> None:
    forest = Forest(
        parent=np.array([-1] + [0] * 80),
        start=np.array([0] + [64_000] * 80),
        length=np.array([64_000] + [1_000] * 80),
        source=np.array([0, *range(80)]),
        last=np.arange(1, 81),
    )
    s = summary(planned(forest, ranks=1, max_positions=144_000, packs_per_update=1))
    assert s["positions"] == 144_000
    assert s["ratio"] == pytest.approx(36.1, abs=0.05)
    assert s["visible_pairs"]["standalone"] == pytest.approx(169e9, rel=0.001)
    assert s["visible_pairs"]["packed"] == pytest.approx(7.2e9, rel=0.002)
    assert s["visible_pairs"]["ratio"] == pytest.approx(23.4, abs=0.05)


def test_every_mode_describes_itself() -> None:
    forest = forest_of([(1, 2), (3,)])
    for options in ({"mode": "standalone", "packs_per_update": 2}, {"examples_per_update": 1}):
        assert "examples" in describe(planned(forest, max_positions=8, **options))


def test_planning_100_000_lengths_takes_under_two_seconds_and_wastes_under_one_percent() -> None:
    forest = two_levels(examples=100_000)
    seconds = []
    while len(seconds) < 3 and min(seconds, default=2) >= 2:
        begin = time.process_time()
        plan = planned(forest, ranks=8, max_positions=65_536, packs_per_update=16)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 2
    assert max(summary(plan)["waste"].values()) < 0.01


def test_a_pack_s_tables_name_only_its_own_members() -> None:
    """Splitting a group moves children to another pack: no segment may go on being copied from one that left."""
    forest = forest_of([(*[1] * 50, 2, group, item) for group in range(9) for item in range(9)])
    packer = Packer(forest, 2)
    packs = packer.pack(packer.select(range(len(forest))), 63, range(len(forest)), per_pack=63)
    for pack in (pack_of(roots, forest.lengths.tolist()) for roots in packs):
        assert {example for example, _ in pack.origin} <= set(pack.members)
