"""The page of a plan: pictures to scale, every figure the plan's, hostile text as text, small whatever the data."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import compose, console
from configs.schema import Config
from prefix_train import cli, planning, tiny
from prefix_train.data import Examples
from prefix_train.packing import Pack
from prefix_train.plan import RunPlan
from prefix_train.plan_page import page, trees
from prefix_train.plan_page.trees import Bar, Tree
from prefix_train.planning import Planned
from tests import chats
from tests.bench.plan_bench import two_levels
from tests.chats import row
from tests.run_page import Page
from tests.tiny_vision import BUILD
from tests.unit.test_plan import forest_of, planned

HOSTILE = "{{ 7*7 }}<script>alert(1)</script>\"'&</title></style>\x07\u202e"


def configured(folder: Path, data: Path, **more: Any) -> Config:
    given = {
        "run_root": str(folder / "runs"),
        "cluster": "local",
        "model": {"build": dict(BUILD)},
        "data": {"train": str(data), **more},
        "pack": {"packs_per_update": 2},
        "train": {"epochs": 1},
    }
    (folder / "c.yaml").write_text(json.dumps(given))
    return compose.load(folder / "c.yaml", [])


def shown(config: Config) -> tuple[Page, str, dict[str, Any], Planned]:
    made = planning.make(config, keep=False, choose_size=False)
    found = planning.summary(made)
    text = page.render(made, found)
    return Page(text), text, found, made


@pytest.fixture
def mixed(tmp_path: Path) -> Config:
    """Two instructions, one dated; hostile texts; one example too long, one without an answer."""
    rules = " ".join(f"Rule {number}: look twice." for number in range(30))
    rows = [row(f"Which is {n}?", system=f"{HOSTILE} Today is 2026-11-{10 + n % 3}. {rules}") for n in range(12)]
    rows += [row(f"{HOSTILE} {n}", HOSTILE, system="Count what you see. " * 20) for n in range(5)]
    rows += [row("word " * 3000), row("Which?", "")]
    return configured(tmp_path, chats.write(tmp_path / "<b>.jsonl", rows), max_example_tokens=2000)


def test_the_page_tells_what_the_plan_found_and_needs_nothing_else(mixed: Config) -> None:
    found, text, summary, made = shown(mixed)
    assert not {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object", "b"}
    assert not [a for _, attributes in found.tags for a in attributes if a.startswith("on") or a in ("src", "href")]
    assert "url(" not in found.css
    assert "@import" not in found.css
    assert "\u202e" not in text
    assert "\x07" not in text
    assert "{{ 7*7 }}&lt;script&gt;alert" in text
    assert (summary["examples"], len(summary["skipped"]), summary["too_long"]["examples"]) == (17, 2, 1)
    words = " ".join(found.texts)
    assert f"17 examples in {summary['packs']} packs: {summary['positions']:,} positions are computed" in words
    assert "A run would not start." in words
    (longest,) = summary["too_long"]["longest"]
    place = f"{mixed.data.train}:18"
    assert longest["source"] == place
    assert found.table("Examples of more than 2,000 tokens: 1")[place] == [
        f"{longest['tokens']:,}",
        f"{longest['tokens'] - 2000:,}",
    ]
    assert f"give data.max_example_tokens={longest['tokens']}" in words
    assert list(found.table("Left out")) == ["example", place, f"{mixed.data.train}:19"]
    top = found.table("The longest examples")
    lengths = made.index.lengths
    assert int(top[made.index.sources[int(lengths.argmax())]][0]) == lengths.max()
    assert [int(cells[0]) for name, cells in top.items() if name != "example"] == sorted(lengths, reverse=True)
    shared = found.table("Shared beginnings")
    assert any(cells[1] == "5" and cells[3] == f"{mixed.data.train}:13" for cells in shared.values())
    dates = found.table("Differing texts, 1")
    assert len(dates) == 4
    assert {cells[0] for cells in dates.values()} == {"examples", "4"}
    assert sum(tag == "mark" for tag, _ in found.tags) == sum(
        1 + one["variant_count"] for one in summary["near_misses"]
    )
    assert found.table("Packs and sharing")["positions"] == [
        f"{summary['positions']:,} for {summary['logical_tokens']:,} logical tokens: {summary['ratio']:.1f} times fewer"
    ]


def test_of_many_near_misses_those_that_save_most_are_shown(mixed: Config) -> None:
    _, _, found, made = shown(mixed)
    (one, *_) = found["near_misses"]
    many = [{**one, "saves": 1000 - n, "variants": one["variants"] * 5, "variant_count": 99} for n in range(20)]
    page_of_many = Page(page.render(made, {**found, "near_misses": many}))
    words = " ".join(page_of_many.texts)
    assert words.count("were these texts equal, this plan would have") == page.MISSES
    assert "this plan would have 1,000 positions less" in words
    assert "12 more, which would save less" in words
    assert words.count("and 91 more") == page.MISSES


def test_ids_are_unique_and_pictures_have_words(mixed: Config) -> None:
    found, _, _, _ = shown(mixed)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) >= 6
    for tag, attributes in found.tags:
        if tag == "svg":
            assert set(attributes["aria-labelledby"].split()) <= set(ids)


def drawn(pack: Pack, narrow: float = 0.0) -> list[Bar]:
    return list(trees.bars(pack, Tree.of(pack), narrow, lambda segment: f"segment {segment}"))


def test_bars_are_where_the_segments_are() -> None:
    pack = Pack(
        lengths=(100, 40, 5, 6, 20, 30),
        parents=(-1, 0, 1, 1, 0, -1),
        origin=((0, 0), (0, 100), (0, 140), (1, 140), (2, 100), (3, 0)),
        members=(0, 1, 2, 3),
        paths=((0, 1, 2), (0, 1, 3), (0, 4), (5,)),
        positions=201,
        logical=100 + 45 + 100 + 46 + 120 + 30,
        pairs=0,
    )
    found = sorted((bar.begin, bar.end, bar.whole, bar.depth) for bar in drawn(pack))
    assert found == [
        (0, 100, 171, 0),
        (100, 140, 151, 1),
        (140, 145, 145, 2),
        (145, 151, 151, 2),
        (151, 171, 171, 1),
        (171, 201, 201, 0),
    ]
    words = {bar.begin: bar.words for bar in drawn(pack)}
    assert words[0] == "100 tokens at positions 0 to 99; 3 examples; segment 0"
    assert words[171] == "30 tokens at positions 171 to 200; one example; segment 5"
    chart = trees.draw("p", "Pack", pack, lambda segment: HOSTILE)
    places = re.findall(r'<rect class="segment s(\d)" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', chart.svg)
    assert len(places) == 6
    for (depth, left, top, width), bar in zip(places, drawn(pack), strict=True):
        assert int(depth) == bar.depth == int(top) // (trees.ROW + trees.GAP)
        assert float(left) == pytest.approx(bar.begin / 201 * 400, abs=0.01)
        assert float(width) == pytest.approx((bar.end - bar.begin) / 201 * 400, abs=0.51)
    assert "<script>" not in chart.svg


def test_narrow_branches_are_drawn_together_and_none_is_lost() -> None:
    pack = next(planned(two_levels(examples=3000), ranks=1, max_positions=200_000, packs_per_update=1).packs)
    every, few = drawn(pack), drawn(pack, narrow=pack.positions / 100)
    assert len(few) < 210 < len(every) == len(pack.lengths)
    assert sum(bar.end - bar.begin for bar in few) == pack.positions
    for left, right in pairwise(sorted((bar.begin, bar.end) for bar in few)):
        assert left[1] == right[0]


def test_a_hundred_thousand_examples_make_a_small_page_in_seconds(
    mixed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the plan: sharing, packs of other sizes, the page. Every line of the data is long or bad."""
    _, _, _, small = shown(mixed)
    forest, count = two_levels(examples=100_000), 100_000
    index = replace(
        small.index,
        sources=tuple(f"{'x' * 300}.jsonl:{n}" for n in range(count)),
        targets=np.ones(count, np.int64),
        fingerprints=np.zeros(count, np.uint64),
        forest=forest,
    )
    plan = planned(forest, ranks=1, max_positions=400_000, packs_per_update=1)
    bad = [f"d.jsonl:{n}: {'x' * 1000}" for n in range(count)]
    examples = Examples(small.examples, bad, [(f"d.jsonl:{n}", 5000 + n) for n in range(count)])
    made = replace(small, index=index, run=RunPlan(lambda epoch: plan, 1), examples=examples)
    monkeypatch.setattr(Planned, "text_of", lambda self, example, start, length: "x" * 300)
    begin = time.process_time()
    found = planning.summary(made)
    middle = time.process_time()
    text = page.render(made, found)
    assert (middle - begin, time.process_time() - middle) < (10, 10)
    assert len(text.encode()) < 1_000_000
    assert "99,960 more are not shown" in text
    assert len(planning.describe(made, found)) < 20_000
    Page(text)


def test_the_deepest_tree_of_narrow_segments_is_a_small_picture() -> None:
    forest = forest_of([tuple(range(20 * n)) for n in range(1, 200)])
    (pack, *_) = planned(forest, ranks=1, max_positions=400_000, packs_per_update=1).packs
    assert max(map(len, pack.paths)) > 100
    assert len(trees.draw("p", "Pack", pack, lambda segment: "x" * 300).svg) < 100_000


def test_white_space_that_differs_is_seen(tmp_path: Path) -> None:
    rules = " ".join(f"Rule {number}: look twice." for number in range(30))
    rows = [row("Which?", system=f"{white}{rules}") for white in ("", "\n\n", "  ", "\t")]
    found, _, summary, _ = shown(configured(tmp_path, chats.write(tmp_path / "d.jsonl", rows)))
    assert summary["near_misses"]
    text = " ".join(found.texts)
    assert any(sign in text for sign in "⏎␣⇥")
    assert page._spelt(" \n") == "␣⏎"
    assert page._spelt("") == "(nothing)"
    assert page._spelt(" a b\t") == "␣a b⇥"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        console.run(cli.app, argv)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def saved_model(folder: Path) -> Path:
    tiny.build_config(BUILD).save_pretrained(folder)
    tiny.build_processor(tiny.build_config(BUILD)).save_pretrained(folder)
    return folder


def test_plan_of_data_chooses_packs_that_hold_it_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = saved_model(tmp_path / "model")
    rows = [row(f"Which is {n}?", system="word " * 9000) for n in range(4)]
    chats.write(tmp_path / "d.jsonl", rows)
    arguments = ["plan", "d.jsonl", "--model", str(model), "--html", "p.html", "--json"]
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    document = json.loads(out.splitlines()[-1])
    assert document["max_positions"] == 32768
    assert document["skipped"] == []
    assert "pack.max_positions is not given; planned with 32,768" in out
    assert [size["max_positions"] for size in document["sizes"]] == [16384, 32768, 65536, 131072]
    assert "Plan of d.jsonl" in (tmp_path / "p.html").read_text()
    assert {entry.name for entry in tmp_path.iterdir()} == {"d.jsonl", "model", "p.html"}
    status, out, err = run(capsys, *arguments, "pack.max_positions=8192")
    assert status == 2
    assert "no good example among 4 rows: " in err
    status, out, err = run(capsys, "plan", "c.yaml", "--model", str(model))
    assert (status, err) == (2, "error: c.yaml is a configuration: its model is model.path; leave --model out\n")
    status, _, err = run(capsys, "plan", "d.jsonl", "--model", str(model), "--html", str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert f"{tmp_path} is a folder: say which file in it, as in --html" in err


def test_an_example_that_no_pack_holds_is_left_out_as_others_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = chats.write(tmp_path / "d.jsonl", [row("Which?"), row("word " * 3000)])
    configured(tmp_path, data, max_example_tokens=100_000)
    arguments = ["plan", str(tmp_path / "c.yaml"), "pack.max_positions=1000", "--json"]
    status, out, err = run(capsys, *arguments)
    assert (status, json.loads(out.splitlines()[-1])["examples"]) == (2, 1)
    assert err.startswith(f"error: {data}:2: the example has ")
    assert re.search(r"too long .* has 3,0\d\d: give pack.max_positions=30\d\d \(", out)
    status, _, err = run(capsys, *arguments, "data.on_bad_example=skip")
    assert (status, err) == (0, "")


def test_bad_examples_are_all_named_and_the_plan_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], mixed: Config, tmp_path: Path
) -> None:
    status, out, err = run(capsys, "plan", str(tmp_path / "c.yaml"), "--html", str(tmp_path / "p.html"))
    data = mixed.data.train
    assert status == 2
    assert err.startswith(f"error: {data}:18: the example has ")
    assert "(bad examples: 2 in all)" in err
    assert f"left out      {data}:19: the target is empty" in out
    assert "too long      examples of more than 2,000 tokens: 1; the longest, " in out
    assert (
        out.splitlines()[0] == "no plan       2 examples cannot be used; --json and --html have the plan of the others"
    )
    assert [line[:14].strip() for line in out.splitlines()[:4]] == ["no plan", "too long", "left out", "left out"]
    assert "logical tokens" not in out
    assert "A run would not start." in (tmp_path / "p.html").read_text()
    assert not (tmp_path / "runs").exists(), "no index is kept of data that a run would refuse"
    status, out, err = run(capsys, "plan", str(tmp_path / "c.yaml"), "data.on_bad_example=skip")
    assert (status, err) == (0, "")
    assert (tmp_path / "runs" / "lengths").is_dir()
