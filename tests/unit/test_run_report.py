"""The page of a run: every figure right, nothing from outside, hostile text as text, and damage named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs import console, runfolder
from configs.errors import UserError
from prefix_train import cli, heartbeat
from prefix_train.plan_summary import summary
from prefix_train.results import charts, document, lives, page, tables
from tests import run_folders as made
from tests.run_folders import BEGAN
from tests.run_page import Page, shown
from tests.unit.test_plan import forest_of, planned

HOSTILE = "<script>alert(1)</script>\"'&{{ 7*7 }}</title></style>\x07\u202e"


@pytest.fixture
def troubled(tmp_path: Path) -> Path:
    """A run that hung in its first life, was stopped in its second, and hangs in its third."""
    run = made.begun(tmp_path / "troubled")
    made.put(run / runfolder.PLAN, made.PLAN)
    made.metrics(run, 25)
    runfolder.write_text(run / runfolder.ATTEMPT, "2")
    for number, at in enumerate((BEGAN, BEGAN + 4000, BEGAN + 8000)):
        made.preflight(run, number, at, problem="uncorrected memory errors" if number == 2 else "")
    made.hang(run, 1, 0, BEGAN + 3000, "Rank 3 on node2 has not come to the all_reduce.")
    made.life(run, 0, BEGAN + 3100, "hang", 9, "without node2")
    made.life(run, 1, BEGAN + 7900, "stopped", 20, "begin again")
    made.hang(run, 2, 2, BEGAN + 9000, None)
    made.life(run, 2, BEGAN + 8000, None, 0)
    return run


def test_figures_are_counted_from_what_ran(tmp_path: Path) -> None:
    found, runs = shown(made.complete(tmp_path / "demo-1"))
    figures = {name: row[0] for name, row in found.table("What was counted").items()}
    assert figures["updates done"] == "40"
    assert figures["state"] == "complete: 40 of 40 updates"
    assert figures["loss, first and last"] == "8 → 0.2"
    assert figures["held-out loss"] == "0.25"
    assert figures["held-out answers exact"] == "96.3% of 297 (chance 10%); digit 95.3%"
    assert figures["positions computed"] == "200,000"
    assert figures["logical tokens"] == "5,000,000"
    assert figures["times fewer positions"] == "25"
    assert figures["as planned"] == "26.37"
    assert figures["time in updates"] == "80 s"
    assert figures["median update"] == "2 s"
    assert (figures["positions/s"], figures["logical tokens/s"]) == ("2,500", "62,500")
    assert figures["most memory"] == "3.00 GiB"
    assert figures["tensors trained"] == "141, 141 had a gradient"
    assert (figures["weights changed"], figures["sums agree"]) == ("yes", "yes")
    assert figures["commit"] == "c0ffeec0ffee"
    check = found.table("Packs against transformers")
    assert check["mean loss"] == ["1.50e-08", "1e-05", "yes"]
    assert check["gradient, worst of 141 tensors, relative"] == ["4.00e-06", "–", "reported only"]
    packs = found.table("Packs and sharing")
    assert packs["positions"] == ["72,805 for 1,919,744 logical tokens: 26.4 times fewer"]
    assert packs["updates"] == ["14 in the epoch, 2 packs each"]
    assert "life 0: " in found.texts
    assert "PASS: 2 node(s)" in found.texts
    assert found.table("Environment of node1, node2")["python.version"] == ["pass", "Python 3.11.7"]
    assert runs[0].missing == ()


def test_a_result_that_does_not_fit_the_metrics_is_said(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    changed = made.result(40, positions=1, hash_after="1" * 64)
    changed["verify"] |= {"passed": False, "failed": ["mean_loss"]}
    made.put(run / runfolder.RESULT, changed)
    found, _ = shown(run)
    figures = found.table("What was counted")
    assert figures["sums agree"][0] == "NO: positions 1 against 200,000"
    assert figures["weights changed"][0] == "NO: to the bit as before training"
    assert figures["state"][0].endswith("its check of itself FAILED")
    assert found.table("Packs against transformers")["mean loss"][-1] == "no"


def test_hangs_and_lives_are_on_one_time_line(troubled: Path) -> None:
    found, (run,) = shown(troubled)
    assert [row[3:] for row in found.table("Lives").values()][1:] == [
        ["hang", "9", "without node2; from then on without node2"],
        ["stopped", "20", "begin again"],
        ["not known, or not ended", "–", "–"],
    ]
    assert found.table("Lives")["0"][:2] == [tables.when(BEGAN), tables.when(BEGAN + 3100)]
    hangs = found.table("Hangs")
    assert hangs["1"][0] == "0"
    assert hangs["1"][2:] == [
        "missing_rank, high confidence",
        "Rank 3 on node2 has not come to the all_reduce.",
        "life ended",
    ]
    assert hangs["2"][2:] == ["not judged", "rank 3 is late", "–"]
    line = page.time_line(run, "t")
    assert line is not None
    assert line.title == "Lives and hangs"
    bars = re.findall(r'class="life (\w+)" x="([\d.]+)" y="50" width="([\d.]+)"', line.svg)
    assert [state for state, _, _ in bars] == ["bad", "well", "open"]
    unit = (charts.WIDTH - charts.RIGHT - 12) / (9000 * 1.01)
    for (_, left, width), (begin, end) in zip(bars, ((0, 3100), (4000, 7900), (8000, 9000)), strict=True):
        assert float(left) == pytest.approx(12 + begin * unit, abs=0.1)
        assert float(width) == pytest.approx((end - begin) * unit - 1, abs=0.2)
    flags = re.findall(r'class="hang" d="M([\d.]+)', line.svg)
    assert [float(at) for at in flags] == pytest.approx([12 + 3000 * unit, 12 + 9000 * unit], abs=0.1)
    assert "FAIL node2: fail: device.ecc: uncorrected memory errors -> drain it" in found.texts
    assert found.table("What preflight found")["node2"][-1] == "uncorrected memory errors → drain it"
    assert "hangs/2/verdict.json: not judged yet" in run.missing


def test_a_life_began_when_its_nodes_said_so(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    made.preflight(run, 0, at=BEGAN + 10**6, wall=BEGAN + 5)
    _, (read,) = shown(run)
    assert read.spans[0].began == BEGAN + 5


def test_a_plan_is_read_as_planning_writes_it(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    plan = planned(forest_of([(*[1] * 20, n) for n in range(9)], 16), max_positions=40, packs_per_update=2)
    made.put(run / runfolder.PLAN, summary(plan) | {"updates_in_run": 40, "skipped": ["line 3: no target"]})
    found, (read,) = shown(run)
    assert read.missing == ()
    told = found.table("Packs and sharing")
    written = summary(plan)
    assert told["positions"][0].startswith(f"{written['positions']} for {written['logical_tokens']} logical tokens")
    assert told["examples"] == [f"9 in {written['packs']} packs ({written['mode']})"]


def test_a_hang_of_a_life_without_a_word_is_on_the_time_line(tmp_path: Path) -> None:
    run = made.begun(tmp_path / "demo-1")
    made.hang(run, 1, 0, BEGAN + 100, "It hung.")
    runfolder.write_text(run / runfolder.ATTEMPT, "3")
    found, (read,) = shown(run)
    assert list(found.table("Lives")) == ["life", "0", "3"]
    line = page.time_line(read, "t")
    assert line is not None
    assert line.svg.count('class="hang"') == 1
    assert "hang 1 in life 0: It hung." in line.svg


def test_lives_of_a_copied_folder_are_shown_in_their_order(troubled: Path) -> None:
    for path in [*troubled.rglob("*.json"), troubled / runfolder.CONFIG]:
        os.utime(path, (BEGAN + 10**6, BEGAN + 10**6))
    _, (run,) = shown(troubled)
    assert lives.timed(run.spans, run.hangs, None) is None
    line = page.time_line(run, "t")
    assert line is not None
    assert line.title.startswith("Lives and hangs, in their order")
    places = [float(x) for x in re.findall(r'class="life \w+" x="([\d.]+)"', line.svg)]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    assert "hours" not in line.svg


def test_a_run_that_has_only_begun_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    found, (run,) = shown(made.begun(tmp_path / "new"))
    assert [line.partition(":")[0] for line in run.missing] == [
        *("metrics.jsonl", "plan.json", "result.json", "code/COMMIT.json", "preflight"),
    ]
    assert found.table("What was counted")["state"][0] == "not complete: 0 of 40 updates; no rank was heard of yet"
    assert found.table("Options that are not")["slurm.nodes"] == ["2", "1"]
    assert set(run.missing) <= set(found.texts)


@pytest.mark.parametrize("result", [False, True])
def test_how_a_job_ended_badly_stands_first_also_where_it_left_a_result(tmp_path: Path, result: bool) -> None:
    run = (made.complete if result else made.begun)(tmp_path / "bad")
    (run / runfolder.LIVES / "0.json").unlink(missing_ok=True)
    line = f"failed: preflight: FAIL {HOSTILE}"
    ending = {"attempt": 0, "status": 78, "cause": "gate", "line": line}
    made.put(run / runfolder.END, ending, BEGAN + 60)
    found, (read,) = shown(run)
    done = "40 of 40 updates" if result else "0 of 40 updates"
    assert found.table("What was counted")["state"][0] == f"life 0 ended badly, {done}: {charts.visible(line)}"
    assert found.table("Lives")["0"][1] == tables.when(BEGAN + 60)
    assert found.table("Lives")["0"][3] == "gate"
    made.put(run / runfolder.END, ending | {"attempt": 1})
    said = tables.state(shown(run)[1][0])
    assert said.startswith("complete: " if result else "not complete: ")  # another life's word is not taken
    made.put(run / runfolder.END, ending | {"status": 0, "cause": "complete", "line": "complete"})
    assert "badly" not in tables.state(shown(run)[1][0])
    assert not any(runfolder.END in line for line in read.missing)


DAMAGE = {
    "plan.json": ("[1]", "plan.json is damaged"),
    "result.json": ("{", "result.json is damaged"),
    "preflight/0/report.json": ("\xff", "preflight/0/report.json is damaged"),
    "lives/0.json": ("[" * 100_000, "lives/0.json is damaged"),
    "hangs/1/alarm.json": ('{"attempt": "x"}', "hangs/1/alarm.json is damaged"),
    "code/COMMIT.json": ("null", "code/COMMIT.json is damaged"),
    "attempt": ("x", "attempt is damaged"),
    "end.json": ('{"attempt": 0}', "end.json is damaged"),
    "heartbeat/rank0.json": ("{}", "heartbeat/rank0.json: without"),
    "logs/rank0.json": ("{}", "logs/rank0.json: without"),
    "config.yaml": ("name: [", "config.yaml:"),
    "metrics.jsonl": (
        '{"update": 1, "loss": 2.5}\n{"up\n{"loss": 1}\n{"update": 1e999}\n{"half',
        "metrics.jsonl: line 2",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    run = made.complete(tmp_path / "demo-1")
    made.hang(run, 1, 0, BEGAN + 100, "It hung.")
    text, said = DAMAGE[name]
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(text.encode("latin-1"))
    found, (read,) = shown(run)
    named = [line for line in read.missing if line.startswith(said)]
    assert len(named) == 1, read.missing
    assert named[0] in found.texts
    if name == "metrics.jsonl":
        assert [line["loss"] for line in read.updates] == [2.5]
        assert "2 more such lines" in named[0]
    else:
        assert found.table("What was counted")["positions computed"][0] == "200,000"


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    run = made.begun(tmp_path / "new")
    (run / runfolder.HANGS).write_text("a file")
    _, (read,) = shown(run)
    assert "hangs cannot be read: Not a directory" in read.missing


def test_runs_side_by_side_share_axes(tmp_path: Path) -> None:
    first = made.complete(tmp_path / "a" / "demo")
    second = made.complete(tmp_path / "b" / "demo", updates=20, lr=0.5)
    made.metrics(second, 20, slower=2.0)
    found, runs = shown(first, second)
    assert [run.label for run in runs] == ["demo (1)", "demo (2)"]
    figures = found.table("What was counted")
    assert figures["figure"] == ["demo (1)", "demo (2)", "where it is from"]
    assert figures["positions/s"][:2] == ["2,500", "1,250"]
    differing = found.table("Options that differ")
    assert set(differing) == {"option", "train.lr"}
    assert differing["train.lr"] == ["0.0002", "0.5"]
    speed = next(chart for chart in page.curves(runs) if chart.title == "Positions per second")
    paths = re.findall(
        r'class="curve s(\d)" stroke-dasharray="([^"]+)" d="M([\d.]+) ([\d.]+)[^"]*L([\d.]+) ', speed.svg
    )
    assert [(index, dashes) for index, dashes, *_ in paths] == [("0", "none"), ("1", "7 3")]
    assert float(paths[0][3]) < float(paths[1][3])  # faster is higher
    assert paths[0][2] == paths[1][2]
    assert float(paths[0][4]) > float(paths[1][4])  # went on for longer
    assert speed.words[1].startswith("demo (2): 1,250 at update 1, 1,250 at update 20")


def test_nothing_comes_from_outside_and_every_chart_has_words(tmp_path: Path, troubled: Path) -> None:
    found, _ = shown(made.complete(tmp_path / "demo-1"), troubled)
    for tag, attributes in found.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "use", "base"}
        assert not {"src", "href", "srcset", "style", "xlink:href"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in found.css
    assert "@import" not in found.css
    policy = [attributes for tag, attributes in found.tags if "http-equiv" in attributes]
    assert policy[0]["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 10
    for tag, attributes in found.tags:
        if tag == "svg" and "aria-hidden" not in attributes:
            assert attributes["role"] == "img"
            assert set(attributes["aria-labelledby"].split()) <= set(ids)
    assert any("demo-1: 8 at update 1, 0.2 at update 40; least 0.2 at 40, most 8 at 1" in text for text in found.texts)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "<img src=x onerror=alert(1)> \udcff\n'")
    made.hang(run, 1, 0, BEGAN + 100, HOSTILE)
    made.life(run, 0, BEGAN + 900, "died", 3, HOSTILE)
    made.preflight(run, 0, BEGAN, problem=HOSTILE)
    made.put(run / runfolder.PLAN, made.PLAN | {"longest": [{"source": HOSTILE, "tokens": 1}]})
    place = tmp_path / "out.html"
    page.write(page.read([run]), place)
    text = place.read_text(encoding="utf-8")
    assert "\x07" not in text
    assert "\u202e" not in text
    found = Page(text)
    assert not {"script", "img"} & {tag for tag, _ in found.tags}
    whole = HOSTILE.replace("\x07", "\\x07").replace("\u202e", "\\u202e")
    assert found.table("Hangs")["1"][3] == whole
    assert found.table("Packs and sharing")["longest 1"] == [f"1 tokens ({whole})"]


def test_secrets_are_masked(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    text = (run / runfolder.CONFIG).read_text()
    assert "setup: []" in text
    (run / runfolder.CONFIG).write_text(text.replace("setup: []", "setup: ['export WANDB_API_KEY=0123456789']"))
    made.hang(run, 1, 0, BEGAN + 100, "It said password: hunter22")
    found, (read,) = shown(run)
    everything = " ".join(found.texts)
    assert read.config is not None
    assert "WANDB_API_KEY=***" in everything
    assert "0123456789" not in everything
    assert "hunter22" not in everything


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        console.run(cli.app, ["report", *argv])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_command_writes_into_the_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    status, out, _ = run_cli(capsys, str(run), "--json")
    assert status == 0
    document = json.loads(out.splitlines()[-1])
    assert document == {
        "page": str(run / "report.html"),
        "runs": [{"run": str(run), "state": "complete: 40 of 40 updates", "missing": []}],
    }
    Page((run / "report.html").read_text(encoding="utf-8"))


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = made.begun(tmp_path / "demo-1")
    for argv, said in (
        ([str(tmp_path)], "is not a run folder"),
        ([str(run), f"{run}/."], "is given twice"),
        ([str(run), "--out", str(tmp_path)], "is a folder"),
        ([str(run), "--out", str(run / "config.yaml" / "x.html")], "cannot be written"),
    ):
        status, _, err = run_cli(capsys, *argv)
        assert status == 2
        assert said in err
        assert len(err.splitlines()) == 1


def test_memory_is_held_against_the_streaming_budget(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    config = (run / runfolder.CONFIG).read_text()
    for old, new in (
        ("engine: sharded", "engine: stream"),
        ("store: null", "store: s"),
        ("budget_gib: null", "budget_gib: 6.5"),
        ("gpus_per_node: 0", "gpus_per_node: 1"),
        ("tasks_per_node: 2", "tasks_per_node: 1"),
        ("  nodes: 2", "  nodes: 1"),
        ("  build:\n    model_type: x", "  build: {}"),
        ("model:\n  path: null", "model:\n  path: m"),
    ):
        assert old in config
        config = config.replace(old, new)
    (run / runfolder.CONFIG).write_text(config)
    found, (read,) = shown(run)
    assert read.missing == ()
    assert found.table("What was counted")["memory planned"] == ["6.50 GiB", "stream.budget_gib"]
    memory = next(chart for chart in page.curves([read]) if chart.title.startswith("Most memory"))
    assert memory.title.endswith("against what was planned")
    assert memory.words[-1] == "demo-1, planned: 6.5 GiB"


def test_a_budget_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    config = (run / runfolder.CONFIG).read_text()
    config = config.replace("gpus_per_node: 0", "gpus_per_node: 2").replace("run_root: runs", f"run_root: {tmp_path}")
    (run / runfolder.CONFIG).write_text(config)
    _, (read,) = shown(run)
    assert [line.partition(":")[0] for line in read.missing] == ["memory's budget"]


def test_ranks_that_ended_badly_are_told(tmp_path: Path) -> None:
    run = made.begun(tmp_path / "demo-1")
    made.metrics(run, 3)
    heartbeat.Heartbeat(run, 1, 4).phase("forward", 4)
    heartbeat.ended(run, 1, 4, error=ValueError("no such <file>"))
    heartbeat.ended(run, 0, 4, status=runfolder.STOPPED)
    found, (read,) = shown(run)
    assert read.spans[-1].cause == "rank 1 ended with ValueError"
    assert found.table("What was counted")["state"][0] == "life 0 ended (rank 1 ended with ValueError): 3 of 40 updates"
    ended = found.table("Ranks that ended badly")
    assert ended["1"][2:] == ["first_update, update 4", "ValueError: no such <file>"]
    assert "0" not in ended


def test_no_torch_and_nothing_slow_is_imported(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    code = (
        "import sys; from pathlib import Path; from prefix_train.results import page; "
        "page.write(page.read([Path(sys.argv[1])]), Path(sys.argv[1]) / 'x.html'); "
        "sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_run_given_twice_is_refused(tmp_path: Path) -> None:
    run = made.begun(tmp_path / "demo-1")
    with pytest.raises(UserError, match="given twice"):
        page.read([run, run])


@pytest.mark.parametrize("life", [3, 0])
def test_damage_to_numbers_of_lives_does_no_harm(tmp_path: Path, life: int) -> None:
    run = made.complete(tmp_path / "demo-1")
    (run / runfolder.ATTEMPT).write_text(str(life) if life else "99999999999")
    (run / runfolder.HANGS / "x").mkdir(parents=True)
    (run / runfolder.LIVES / "٣.json").write_text("{}")
    found, _ = shown(run)
    assert list(found.table("Lives")) == ["life", "0", str(life or 99999999999)]


def test_long_names_break_behind_dots_and_stay_text(tmp_path: Path) -> None:
    """On a phone a name is not cut within a word; what the page shows is the name all the same."""
    run = made.begun(tmp_path / "new")
    runs = page.read([run])
    text = page.render(runs)
    assert '<th scope="row">data.<wbr>train</th>' in text
    assert Page(text).table("Options that are not")["data.train"][0] == "t.jsonl"
    assert document._breakable("a.<b>_c\x07") == "a.<wbr>&lt;b&gt;_<wbr>c\\x07"
