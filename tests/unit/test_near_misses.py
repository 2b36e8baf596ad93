"""Near misses: what differs in a few tokens is found, counted against a tree of examples made equal, and shown."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs import compose, runfolder
from configs.schema import PackConfig
from prefix_train import cli, lengths, meetings, near_misses
from prefix_train.merging import merged
from prefix_train.near_misses import NearMiss, find, planned
from prefix_train.plan import plan_epoch
from prefix_train.tree import Node, Trie
from tests import chats
from tests.chats import picture, row, text
from tests.tiny_vision import BUILD

PROMPT = tuple(range(1000, 1060))
REST = tuple(range(2000, 2100))


def trie_of(sequences: list[tuple[int, ...]]) -> Trie:
    trie = Trie()
    for sequence in sequences:
        trie.insert(np.array(sequence, np.int64))
    return trie


def tokens_in(node: Node) -> int:
    return len(node.tokens) + sum(tokens_in(child) for child in node.children.values())


def members(node: Node) -> list[int]:
    return sum(map(members, node.children.values()), list(node.ends))


def stretches(miss: NearMiss) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    return {tuple(v.keys.tolist()): (v.examples, v.first) for v in miss.variants}


@pytest.mark.parametrize("prompt", [PROMPT, ()], ids=["within", "at the very beginning"])
def test_a_date_within_equal_instructions_is_found(prompt: tuple[int, ...]) -> None:
    dates = [(2, 6, 1, 1), (2, 6, 1, 2), (2, 5), (2, 6, 1, 1)]
    sequences = [(*prompt, *date, *REST, 7, number) for number, date in enumerate(dates)]
    trie = trie_of(sequences)
    before = tokens_in(trie.top)
    (miss,) = find(trie)
    assert miss.alike == len(prompt) + 1
    assert stretches(miss) == {(6, 1, 1): (2, (0, 3)), (6, 1, 2): (1, (1,)), (5,): (1, (2,))}
    assert miss.variants[0].examples == 2
    assert miss.after.tolist() == list(REST[:12])
    assert miss.before.tolist() == [*prompt, 2][-12:]
    equal = trie_of([(*prompt, 2, 5, *REST, 7, number) for number in range(4)])
    assert miss.saves == before - tokens_in(equal.top) == before - tokens_in(trie.top)


def test_a_stretch_may_be_missing_in_one_and_stand_behind_another() -> None:
    """`Name:` and `Name: Dr.`: one variant's text begins with another's, and one has none at all."""
    sequences = [(*PROMPT, *own, *REST, number) for number, own in enumerate([(), (5,), (5, 6), (8, 9)])]
    trie = trie_of(sequences)
    before = tokens_in(trie.top)
    (miss,) = find(trie)
    assert set(stretches(miss)) == {(), (5,), (5, 6), (8, 9)}
    assert miss.saves == before - tokens_in(trie_of([(*PROMPT, *REST, number) for number in range(4)]).top)


def test_a_second_difference_behind_a_first_one_is_found_too() -> None:
    sequences = [(*PROMPT, day, *REST, number, *PROMPT, number) for number, day in enumerate(range(300, 320))]
    first, second = sorted(find(trie_of(sequences)), key=lambda miss: miss.alike)
    assert (first.alike, len(first.variants)) == (60, 20)
    assert (second.alike, len(second.variants)) == (60 + 1 + 100, 20)
    assert (first.saves, second.saves) == (19 * 101, 19 * 61)


def test_two_groups_at_one_place_are_apart() -> None:
    other = tuple(range(3000, 3050))
    sequences = [(*PROMPT, 1 + number, *(REST if number % 2 else other), number) for number in range(6)]
    misses = find(trie_of(sequences))
    assert [sorted(stretches(miss)) for miss in misses] == [[(2,), (4,), (6,)], [(1,), (3,), (5,)]]


@pytest.mark.parametrize(
    "sequences",
    [
        [(*PROMPT, 1, *REST), (*PROMPT, 1, *REST, 5)],
        [(*PROMPT, *range(number, number + 500)) for number in (10_000, 20_000, 30_000)],
        [(*PROMPT, 1, *REST[:31]), (*PROMPT, 2, *REST[:31])],
        [(*PROMPT, *range(5000, 5049), *REST), (*PROMPT, *range(6000, 6049), *REST)],
        [(1,)],
    ],
    ids=["shared already", "nothing shared", "too little follows", "too much differs", "one example"],
)
def test_what_is_no_near_miss_is_not_named(sequences: list[tuple[int, ...]]) -> None:
    trie = trie_of(sequences)
    before = tokens_in(trie.top)
    assert find(trie) == []
    assert tokens_in(trie.top) == before


def test_the_longest_difference_and_the_shortest_continuation_count_still() -> None:
    sequences = [(*PROMPT, *range(start, start + 48), *REST[:32]) for start in (5000, 6000)]
    (miss,) = find(trie_of(sequences))
    assert miss.saves == 48 + 32


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple), min_size=1, max_size=12))
def test_what_is_said_to_be_saved_is_what_the_tree_loses(sequences: list[tuple[int, ...]]) -> None:
    """Repetitive tokens, short stretches: variants below one another, several groups at a fork, several rounds."""
    trie = trie_of(sequences)
    before = tokens_in(trie.top)
    misses = find(trie, stretch=3, follow=2)
    assert sum(miss.saves for miss in misses) == before - tokens_in(trie.top)
    for miss in misses:
        assert miss.saves > 0
        assert len(stretches(miss)) == len(miss.variants) > 1
        for variant in miss.variants:
            assert len(variant.first) == min(variant.examples, near_misses.NAMED) > 0
    assert sorted(members(trie.top)) == list(range(len(sequences)))


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=8), st.data())
def test_groups_are_those_of_a_search_through_all_pairs(lists: list[list[int]], data: st.DataObject) -> None:
    keys = np.zeros((len(lists), 9), np.int64)
    for place, values in enumerate(lists):
        keys[place, : len(values)] = values
    branch = np.sort(data.draw(st.lists(st.integers(0, 2), min_size=len(lists), max_size=len(lists))))
    length = np.array([len(values) for values in lists])
    texts = [{tuple(v[at : at + 3]): at for at in reversed(range(6)) if at + 3 <= len(v)} for v in lists]
    found = list(meetings.groups(keys, length, branch, 5, 3))
    taken: set[int] = set()
    for rows, offsets in found:
        (value,) = {tuple(lists[r][at : at + 3]) for r, at in zip(rows.tolist(), offsets.tolist(), strict=True)}
        assert [texts[r][value] for r in rows.tolist()] == offsets.tolist()
        assert len({int(branch[r]) for r in rows}) > 1
        having = {r for r in range(len(lists)) if value in texts[r] and r not in taken}
        assert having == set(rows.tolist())
        taken |= having
    rest = [r for r in range(len(lists)) if r not in taken]
    assert not [(a, b) for a in rest for b in rest if branch[a] != branch[b] and texts[a].keys() & texts[b].keys()]


def test_a_hundred_thousand_examples_take_seconds() -> None:
    rng = np.random.default_rng(0)
    days, instructions = rng.integers(0, 10, (100_000, 6)), np.arange(5000, 5150)
    own = rng.integers(100, 4000, (100_000, 20))
    trie = Trie()
    for number in range(100_000):
        trie.insert(np.r_[PROMPT, days[number] % 4, instructions, own[number]])
    begin = time.process_time()
    misses = find(trie)
    assert time.process_time() - begin < 30
    assert misses[0].alike == len(PROMPT)
    assert len(misses[0].variants) == 4**6
    assert sum(variant.examples for variant in misses[0].variants) == 100_000


def made_equal(sequences: list[tuple[int, ...]], miss: NearMiss) -> list[tuple[int, ...]]:
    """Sequences that have one of the ways of `miss` with the first of them: the definition, written as it is read."""
    fork, ways = (tuple(miss.place.fork.tolist()), [tuple(way.tolist()) for way in miss.place.ways])
    made = []
    for sequence in sequences:
        way = next((way for way in ways if sequence[: len(fork) + len(way)] == (*fork, *way)), None)
        made.append(sequence if way is None else (*fork, *ways[0], *sequence[len(fork) + len(way) :]))
    return made


def planned_positions(trie: Trie) -> int:
    """With packs of a size that splits what is shared."""
    forest = trie.forest(1)
    pack = PackConfig(max_positions=int(forest.lengths.max()) + 7, packs_per_update=1)
    return sum(pack.positions for pack in plan_epoch(forest.lengths, forest, pack, 1, 0, 0).packs)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple), min_size=2, max_size=12))
@example([(1, 1, 0, 1, 1, 0, 0), (1, 0, 0, 1, 2), (0, 2, 2, 1, 2, 0, 0)])
def test_what_a_plan_saves_is_the_difference_of_two_plans(sequences: list[tuple[int, ...]]) -> None:
    """Of the examples, and of the examples with equal texts, both read and planned anew."""
    trie = trie_of(sequences)
    whole = trie.copy()
    found = sorted(find(trie, stretch=3, follow=2), key=lambda miss: miss.place.number)
    compared = {miss.place: miss.saves for miss in planned(found, whole, planned_positions)}
    assert tokens_in(whole.top) == tokens_in(trie_of(sequences).top), "the tree that is compared with is left alone"
    for miss in found[: near_misses.LISTED]:
        before = sequences
        for place in near_misses._needed(miss.place, [other.place for other in found]):
            before = made_equal(before, next(other for other in found if other.place is place))
        after = made_equal(before, miss)
        assert after != before
        assert compared[miss.place] == planned_positions(trie_of(before)) - planned_positions(trie_of(after))


def test_a_tree_in_which_some_examples_are_equal_is_the_tree_of_equal_examples() -> None:
    """Another length of the stretch moves all that follows it."""
    sequences = [(*PROMPT, *range(300, 300 + 1 + number % 3), *REST, 7, number) for number in range(9)]
    (miss,) = find(trie_of(sequences))
    made = merged(trie_of(sequences), [miss.place.whole()]).forest(1)
    wanted = trie_of(made_equal(sequences, miss)).forest(1)
    for number in range(9):
        paths = [(forest, list(forest.path(number))) for forest in (made, wanted)]
        for name in ("start", "length"):
            first, second = (getattr(forest, name)[path].tolist() for forest, path in paths)
            assert first == second
    with pytest.raises(ValueError, match="no example"):
        merged(trie_of(sequences), [(np.array([5]), [np.array([6])])])


LONG = tuple(range(10_000, 10_400))
TURN = tuple(range(4000, 4060))


def asked(number: int, turn: tuple[int, ...] = TURN, rules: tuple[int, ...] = LONG) -> tuple[int, ...]:
    """A question of its own behind long instructions, and a turn behind it that all have in common."""
    return (*rules, *range(20_000 + 8 * number, 20_008 + 8 * number), *turn, number)


def test_ordinary_turns_are_no_near_miss_and_a_date_before_them_is_the_first() -> None:
    turns = [asked(number) for number in range(40)]
    assert find(trie_of(turns)) == []
    dated = [(1, 2, 100 + number % 3, *asked(number, rules=LONG[::-1])) for number in range(40)]
    misses = find(trie_of([*turns, *dated]))
    assert [(miss.alike, len(miss.variants)) for miss in misses] == [(2, 3)]
    twice = [(*asked(number // 2)[:-1], number) for number in range(80)]
    assert find(trie_of(twice)) == [], "also where each question comes twice"


def test_an_id_of_each_example_is_a_near_miss_where_much_follows_it() -> None:
    for count, many in ((99, False), (101, True)):
        follows = tuple(range(4000, 4000 + count))
        assert bool(find(trie_of([asked(number, follows) for number in range(40)]))) == many


def test_one_text_of_many_examples_is_a_near_miss_whatever_is_before_it() -> None:
    sequences = [(*LONG, 5 + number % 3, *TURN, number) for number in range(40)]
    (miss,) = find(trie_of(sequences))
    assert miss.saves == 2 * 61


def test_the_plan_says_what_equal_texts_would_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the plan of the same rows with equal texts; the packs are too small for all of them."""
    rules = " ".join(f"Rule {number}: look twice." for number in range(20))
    config = {
        "run_root": str(tmp_path / "runs"),
        "cluster": "local",
        "model": {"build": dict(BUILD)},
        "data": {"train": str(tmp_path / "d.jsonl")},
        "pack": {"packs_per_update": 1, "max_positions": 1024},
        "slurm": {"tasks_per_node": 1},
        "train": {"epochs": 1},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    found = []
    for days in (3, 1):
        chats.write(
            tmp_path / "d.jsonl",
            [row(f"Which is {n}? " * 9, system=f"Today is the {1 + n % days}. {rules}") for n in range(60)],
        )
        cli.plan_command(tmp_path / "c.yaml", as_json=True)
        *said, document = capsys.readouterr().out.splitlines()
        found.append((json.loads(document), said))
    (dated, said), (equal, _) = found
    (miss,) = dated["near_misses"]
    assert dated["packs"] > 2
    assert miss["saves"] == dated["positions"] - equal["positions"] > 0
    assert miss["saves"] != miss["saves_in_tree"]
    words = f"this plan would have {miss['saves']:,} positions less:"
    assert any(line.endswith(words) for line in said)
    assert equal["near_misses"] == []


def test_images_are_named_and_differ_as_their_placeholders_do(tmp_path: Path) -> None:
    for number in range(2):
        chats.draw(tmp_path / f"{number}.png", seed=number)
    rules = " ".join(f"Rule {number}: look twice." for number in range(30))
    renderer, trie = chats.renderer(), Trie()
    for number in range(2):
        example = renderer.render(row([picture(f"{number}.png"), text(rules)]), f"d.jsonl:{number + 1}", tmp_path)
        trie.insert(example.keys)
    (miss,) = near_misses.summary(find(trie), ["d.jsonl:1", "d.jsonl:2"], renderer.text_of)
    assert [variant["text"] for variant in miss["variants"]] == ["(image)", "(image)"]
    assert miss["before"].endswith("<|vision_start|>")


def test_near_misses_are_shown_with_their_text_and_lines(tmp_path: Path) -> None:
    rules = " ".join(f"Rule {number}: look twice." for number in range(30))
    renderer, trie = chats.renderer(), Trie()
    days = ["2026-11-30", "2026-11-29", "2025-01-07", "2026-11-30", "2024-02-02"]
    for number, day in enumerate(days):
        record = row(f"Which is {number}?", system=f"Today is {day}. {rules}")
        trie.insert(renderer.render(record, "x", tmp_path).keys)
    found = near_misses.summary(find(trie), [f"d.jsonl:{n + 1}" for n in range(5)], renderer.text_of)
    assert json.loads(json.dumps(found)) == found
    variants = {variant["text"]: variant for variant in found[0]["variants"]}
    common = found[0]["before"]
    whole = {(common + text).split("Today is ")[1]: v["sources"] for text, v in variants.items()}
    assert whole["2026-11-30"] == ["d.jsonl:1", "d.jsonl:4"]
    assert set(whole) == set(days)
    said = near_misses.describe(found)
    assert "\nnearly shared 5 examples differ in 4 short texts after " in said
    assert ": 2 times, d.jsonl:1\n" in said
    assert "  and 1 more" in said
    assert near_misses.describe([]) == ""


def test_the_plan_shows_them_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = " ".join(f"Rule {number}: look twice." for number in range(30))
    days = ["2026-11-30", "2026-11-29"]
    chats.write(tmp_path / "d.jsonl", [row("Which?", system=f"Today is {day}. {rules}") for day in days])
    config = {
        "run_root": str(tmp_path / "runs"),
        "cluster": "local",
        "model": {"build": dict(BUILD)},
        "data": {"train": str(tmp_path / "d.jsonl")},
        "pack": {"packs_per_update": 2},
        "train": {"epochs": 1},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    cli.plan_command(tmp_path / "c.yaml", as_json=True)
    *said, document = capsys.readouterr().out.splitlines()
    (miss,) = json.loads(document)["near_misses"]
    assert [variant["sources"] for variant in miss["variants"]] == [[f"{tmp_path}/d.jsonl:{n}"] for n in (1, 2)]
    assert any(line.startswith("nearly shared 2 examples differ in 2 short texts after ") for line in said)


def test_a_start_of_a_job_neither_waits_for_advice_nor_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It plans its run folder."""

    def fails(trie: Trie) -> list[NearMiss]:
        raise MemoryError

    monkeypatch.setattr(near_misses, "find", fails)
    data = chats.write(tmp_path / "d.jsonl", [row(f"Which is {number}?") for number in range(2)])
    config = chats.configured(tmp_path, data)
    with pytest.raises(MemoryError):
        cli.plan_command(tmp_path / "c.yaml")
    (tmp_path / "run").mkdir()
    runfolder.write_text(tmp_path / "run" / runfolder.CONFIG, compose.to_yaml(config))
    page = tmp_path / "p.html"
    cli.plan_command(tmp_path / "run", html=page)
    assert "\nnearly shared" not in capsys.readouterr().out
    written = runfolder.read_json(tmp_path / "run" / runfolder.PLAN)
    assert (written["examples"], written["near_misses"]) == (2, None)
    assert page.is_file()
    lengths.load(config)


def test_many_near_misses_behind_a_long_beginning_take_no_copy_of_it_each() -> None:
    long, trie = np.arange(10**6, 10**6 + 20_000), Trie()
    for group in range(60):
        for number in range(2 * near_misses.SEVERAL):
            rest = 1000 * group + np.arange(near_misses.FOLLOW + 8)
            trie.insert(np.r_[long, 10**5 + group, 7 + number % 2, rest, 10**7 + number])
    tracemalloc.start()
    misses = find(trie)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(misses) == 60
    assert held < 20 * long.nbytes
    assert all(miss.place.fork[:-1].tolist() == long.tolist() for miss in misses)


@pytest.mark.parametrize("at", ["in the prompt", "at the very beginning"])
def test_images_of_any_size_that_differ_are_a_near_miss(tmp_path: Path, at: str) -> None:
    """An image has one token for each 32 x 32 pixels here: far more than a differing stretch may have."""
    rules = " ".join(f"Rule {number}: look twice." for number in range(30))
    chats.draw(tmp_path / "all.png", 64, 64, seed=9)
    shown = [picture("all.png"), text("Compare with:")] if at == "in the prompt" else []
    renderer, trie, keys = chats.renderer(), Trie(), []
    for number, side in enumerate((256, 288, 320)):
        chats.draw(tmp_path / f"{number}.png", side, side, seed=number)
        example = renderer.render(row([*shown, picture(f"{number}.png"), text(rules)]), f"d:{number}", tmp_path)
        trie.insert(example.keys)
        keys.append(example.keys)
    placeholders = [int((each == each[each < 0][-1]).sum()) for each in keys]
    assert min(placeholders) > near_misses.STRETCH
    (miss,) = find(trie)
    assert sorted(variant.tokens for variant in miss.variants) == sorted(placeholders)
    first = int(np.flatnonzero(keys[0] == keys[0][keys[0] < 0][-1])[0])
    assert miss.alike == first
    rest = len(keys[0]) - first - placeholders[0]
    # As if all three had the smallest image: two larger ones and two copies of what follows less.
    assert miss.saves == placeholders[1] + placeholders[2] + 2 * rest
    equal = merged(trie_of([tuple(each.tolist()) for each in keys]), [miss.place.whole()])
    assert equal.forest(1).lengths.tolist() == [len(keys[0])] * 3
    assert tokens_in(equal.top) == sum(map(len, keys)) - miss.saves - 2 * first
    (said,) = near_misses.summary([miss], ["d:1", "d:2", "d:3"], renderer.text_of)
    assert [variant["text"] for variant in said["variants"]] == ["(image)"] * 3
    assert said["before"].count("(image)") <= 1


RULES = " ".join(f"Rule {number}: look twice." for number in range(30))
DIFFERING = {
    "dates": lambda n: f"Today is {('Mon', 'Tue', 'Wed')[n % 3]}, {1 + n % 28} March 20{20 + n % 7}. {RULES}",
    "ids": lambda n: f"Case 7f{n:04x}a0-99b1-4e{n:02d}-8c0d-{n * 7919:012x}. {RULES}",
    "names": lambda n: f"You work for {('Ann Öztürk', 'Bo', 'María-José de la Cruz', '王小明')[n % 4]}. {RULES}",
    "white space at the beginning": lambda n: (
        f"{('', ' ', chr(10), chr(10) * 3, chr(9), chr(13) + chr(10))[n % 6]}{RULES}"
    ),
    "a number at the beginning": lambda n: f"{n}. {RULES}",
}


@pytest.mark.parametrize("kind", DIFFERING)
def test_what_differs_in_practice_is_found_through_a_real_tokenizer(tmp_path: Path, kind: str) -> None:
    renderer, trie = chats.renderer(), Trie()
    length = 0
    for number in range(12):
        record = row(f"Which is {number}?", system=DIFFERING[kind](number))
        example = renderer.render(record, f"d:{number}", tmp_path)
        trie.insert(example.keys)
        length = max(length, len(example.keys))
    before = tokens_in(trie.top)
    found = find(trie)
    assert found
    assert sum(variant.examples for variant in found[0].variants) == 12
    # All but one copy of the rules is saved for each variant but one.
    assert tokens_in(trie.top) < before / 2


def test_twenty_thousand_examples_are_looked_at_in_seconds_and_twice_as_many_in_about_twice_the_time() -> None:
    """A date, an id at the very beginning, and an image that differs, each before the same long instructions."""

    def variants(examples: int) -> int:
        days = {(n % 10, n // 10 % 10, n // 100 % 30) for n in range(0, examples, 3)}
        return len(days) + len({n * 7919 % 999_983 for n in range(1, examples, 3)}) + 500

    def seconds(examples: int) -> float:
        rng, trie = np.random.default_rng(0), Trie()
        rules = np.arange(5000, 5400)
        own = rng.integers(100, 4000, (examples, 40))
        for number in range(examples):
            day = [40 + number % 10, 50 + number // 10 % 10, 60 + number // 100 % 30]
            name = [10 + int(digit) for digit in f"{number * 7919 % 999_983:06d}"]
            image = [-2 - number % 500] * 300
            head = (day, name, image)[number % 3]
            prompt = np.arange(60) + 700 + 100 * (number % 3) if number % 3 != 1 else np.array([1, 2])
            trie.insert(np.r_[prompt, np.array(head, np.int64), rules, own[number]])
        begin = time.process_time()
        misses = find(trie)
        spent = time.process_time() - begin
        assert len(misses) == 3
        assert sum(variant.examples for miss in misses for variant in miss.variants) == examples
        assert {miss.alike for miss in misses} == {2, 60}
        assert sum(len(miss.variants) for miss in misses) == variants(examples)
        return spent

    half, whole = seconds(10_000), seconds(20_000)
    assert whole < 20
    assert whole < 4 * half + 1
