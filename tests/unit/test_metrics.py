"""Metrics of answers: what counts as right, and every mistake in a user's own as one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs import metric_names, runfolder
from configs.errors import UserError
from configs.schema import Config, DataConfig, EvaluateConfig, ModelConfig
from prefix_train import metrics
from prefix_train.metrics import Answer, Exact, JsonFields
from slurm import submit


def answer(expected: str, text: str, complete: bool = True) -> Answer:
    return Answer("a", "data.jsonl:7", expected, text, complete, 3)


def scored(expected: Any, text: str) -> dict[str, Any]:
    found = JsonFields().score(answer(json.dumps(expected), text), {})
    assert found is not None
    return found


def test_exact_is_letter_by_letter_and_has_ended() -> None:
    assert Exact().score(answer("a b", "a b"), {}) == 1
    assert Exact().score(answer("a b", "a b", complete=False), {}) == 0
    assert Exact().score(answer("a b", "a  b"), {}) == 0
    assert Exact().summary([1.0, 0.0, 0.0, 0.0]) == 0.25


@pytest.mark.parametrize(
    ("expected", "given", "right"),
    [
        ("1", "1.0", True),
        ("1", "10e-1", True),
        ("1", "1.0000000000000000001", False),
        ("1", '"1"', False),
        ("1", "true", False),
        ("0", "false", False),
        ("null", "null", True),
        ("null", '""', False),
        ('"Ab"', '"ab"', False),
        ('"ab"', '"ab "', False),
        ("[1, 2]", "[1.0, 2]", True),
        ("[1, 2]", "[2, 1]", False),
        ("[1, 2]", "[1]", False),
        ('[{"a": 1}]', '[{"a": 1.0}]', True),
        ('[{"a": 1}]', '[{"a": 1, "b": 2}]', False),
        ("[true]", "[1]", False),
        ("{}", "{}", True),
        ("[]", "{}", False),
        ("1e400", "2e400", False),
    ],
)
def test_when_two_values_are_equal(expected: str, given: str, right: bool) -> None:
    found = JsonFields().score(answer(f'{{"v": {expected}}}', f'{{"v": {given}}}'), {})
    assert found is not None
    assert found["right"] == {"v": right}


@pytest.mark.parametrize(
    "text",
    [
        '{"v": 1',
        '```json\n{"v": 1}\n```',
        'The answer is {"v": 1}',
        '{"v": 1} ',
        '{"v": 1, "v": 2}',
        '{"v": NaN}',
        "[1]",
        "1",
        "",
        "[" * 100_000,
        '{"v": 1e99999999999999999999999}',
    ],
)
def test_what_is_valid(text: str) -> None:
    found = scored({"v": 1}, text)
    assert found["valid"] == (text == '{"v": 1} ')
    assert found["right"] == {"v": found["valid"]}
    assert found["missing"] == ([] if found["valid"] else ["v"])


def test_fields_are_named_by_their_paths() -> None:
    expected = {"name": {"first": "A", "last": "B"}, "a.b": 1, "tags": ["x"], "more": {}}
    found = scored(expected, '{"name": {"first": "A", "middle": "M"}, "a.b": 2, "tags": {"0": "x"}, "more": {}}')
    assert found == {
        "valid": True,
        "right": {"name.first": True, "name.last": False, '"a.b"': False, "tags": False, "more": True},
        "missing": ["name.last", "tags"],
        "extra": ["name.middle", "tags.0"],
    }


def test_the_summary_counts_every_target_field() -> None:
    scores = [
        scored({"v": 1, "w": 2}, '{"v": 1, "w": 2}'),
        scored({"v": 1}, "no"),
        scored({"v": 1}, '{"v": 1, "x": 0}'),
    ]
    assert JsonFields().summary(scores) == {
        "examples": 3,
        "valid": pytest.approx(2 / 3),
        "right": 0.75,
        "missing": 1,
        "extra": 1,
        "fields": {"v": pytest.approx(2 / 3), "w": 1.0},
    }
    assert JsonFields().score(answer("no JSON", '{"v": 1}'), {}) is None


def test_targets_of_which_none_is_json_are_named() -> None:
    metrics.check_targets([JsonFields()], ["text", '{"v": 1}'], "h.jsonl")
    with pytest.raises(UserError, match=r"json: no target in h\.jsonl is a JSON object; leave json out"):
        metrics.check_targets([JsonFields()], ["text", "[1]"], "h.jsonl")


# A user's own.

GOOD = '''
"""A file with what files have."""
from __future__ import annotations
import dataclasses
@dataclasses.dataclass
class Kept:
    words: int
def words(prediction: str, example: dict) -> float:
    return Kept(len(prediction.split())).words
def shares(prediction, example, weight=2):
    return {"same": prediction == example["target"], "kind": example["meta"]["kind"] * weight}
def other_keys(prediction, example): return {prediction: 1}
def raising(prediction, example): raise KeyError("what is\\nnot there")
def leaving(prediction, example): raise SystemExit(0)
def infinite(prediction, example): return {"a": 1, "b": float("inf")}
def text(prediction, example): return "0.5"
def nothing(prediction, example): return None
def empty(prediction, example): return {}
def numbered(prediction, example): return {1: 2}
def huge(prediction, example): return 10**400
def huger(prediction, example): return {"a": 10**5000}
def half(prediction, example): return {"\\ud800": 1}
class Silent(Exception):
    def __str__(self): raise RuntimeError("not even that")
    __repr__ = __str__
def unsayable(prediction, example): raise Silent
def unshowable(prediction, example): return Silent()
class Sly(dict):
    def items(self): raise Silent
def sly(prediction, example): return Sly(a=1)
def greedy(prediction, example):
    example["messages"].clear()
    return float(len(example.pop("meta")))
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "it's mine" / "my_metrics.py"
    path.parent.mkdir()
    path.write_text(GOOD)
    return path


def load(run: Path, *names: str) -> list[metrics.Metric]:
    metrics.freeze(run, names)
    return metrics.load(run, names)


def test_an_own_metric_runs_from_its_copy(tmp_path: Path, file: Path) -> None:
    names = [f"{file}:words", "exact", f"{file}:shares"]
    run = tmp_path / "run"
    metrics.freeze(run, names)
    file.write_text("raise RuntimeError('changed')")
    words, exact, shares = metrics.load(run, names)
    assert (words.name, exact.name, shares.name) == ("words", "exact", "shares")
    row = {"messages": [], "meta": {"kind": 3}}
    assert words.score(answer("x", "one two"), row) == 2.0
    assert shares.score(answer("x", "x"), row) == {"same": 1.0, "kind": 6.0}
    assert row == {"messages": [], "meta": {"kind": 3}}, "each call has a dict of its own"
    assert words.summary([2.0, 4.0]) == 3.0
    assert shares.summary([{"same": 1.0, "kind": 6.0}, {"kind": 0.0, "same": 0.0}]) == {"same": 0.5, "kind": 3.0}
    assert sorted(path.name for path in run.iterdir()) == ["0-my_metrics.py", "sources.json"], "no compiled file"


def test_a_copy_that_was_changed_is_refused(tmp_path: Path, file: Path) -> None:
    name, run = f"{file}:words", tmp_path / "run"
    metrics.freeze(run, [name])
    with (run / "0-my_metrics.py").open("a") as stream:
        stream.write("\n")
    with pytest.raises(UserError, match="is no longer what it was when the run was made"):
        metrics.load(run, [name])
    with pytest.raises(UserError, match="has no copy of it"):
        metrics.load(tmp_path, [name])


def test_what_runs_is_what_was_hashed(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy may change between the look at its hash and its run: it is read once."""
    name, run = f"{file}:words", tmp_path / "run"
    metrics.freeze(run, [name])
    read = Path.read_bytes

    def read_and_change(path: Path) -> bytes:
        content = read(path)
        if path == run / "0-my_metrics.py":
            path.write_text("def words(prediction, example): return -1.0")
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_change)
    (words,) = metrics.load(run, [name])
    assert words.score(answer("x", "one two"), {}) == 2.0
    assert "-1.0" in (run / "0-my_metrics.py").read_text()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raising", "the function raised KeyError: 'what is\\nnot there'"),
        ("leaving", "the function raised SystemExit: 0"),
        ("infinite", "the function gave inf for 'b': give a finite number"),
        ("text", "the function gave '0.5': give a finite number"),
        ("nothing", "the function gave None: give a finite number"),
        ("empty", "the function gave {}: give a number, or a dict of numbers by name"),
        ("numbered", "the function gave {1: 2}: give a number, or a dict of numbers by name"),
        ("huge", f"the function gave 1{'0' * 199}: give a finite number"),
        ("huger", "the function gave something of type int for 'a': give a finite number"),
        ("half", "the function gave {'\\ud800': 1}: give a number, or a dict of numbers by name"),
        ("unsayable", "the function raised Silent"),
        ("unshowable", "the function gave something of type Silent: give a finite number"),
        ("sly", "the function raised Silent"),
    ],
)
def test_what_an_own_metric_may_do_wrong(tmp_path: Path, file: Path, function: str, words: str) -> None:
    (metric,) = load(tmp_path / "run", f"{file}:{function}")
    with pytest.raises(UserError) as caught:
        metric.score(answer("x", "y"), {})
    assert str(caught.value) == f"evaluate.metrics: {file}:{function}: data.jsonl:7: {words}"


def test_what_one_metric_does_to_its_example_no_other_sees(tmp_path: Path, file: Path) -> None:
    greedy, shares = load(tmp_path / "run", f"{file}:greedy", f"{file}:shares")
    row = {"messages": [{"role": "user", "content": "x"}], "meta": {"kind": 3}}
    before = json.dumps(row)
    assert greedy.score(answer("x", "x"), row) == 1.0
    assert json.dumps(row) == before
    assert shares.score(answer("x", "x"), row) == {"same": 1.0, "kind": 6.0}


def test_keys_that_differ_between_examples(tmp_path: Path, file: Path) -> None:
    (metric,) = load(tmp_path / "run", f"{file}:other_keys")
    scores = [metric.score(answer("x", text), {}) for text in "ab"]
    with pytest.raises(UserError, match="other_keys: the function gave different keys for different examples"):
        metric.summary(scores)


def test_numbers_without_a_mean(tmp_path: Path, file: Path) -> None:
    (metric,) = load(tmp_path / "run", f"{file}:words")
    with pytest.raises(UserError, match="words: the numbers are too large to have a mean"):
        metric.summary([1.7e308, 1.7e308])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def g(p, e): return 1", "no function f at the top of the file; it has g"),
        ("", "no function f at the top of the file; it has none"),
        ("f = 3", "no function f at the top of the file; it has none"),
        ("def f(p): return 1", "f must take two values"),
        ("def f(p, e, more): return 1", "f must take two values"),
        ("def f(p, e, *, more): return 1", "f must take two values"),
        ("def f(p, e: return 1", "my.py:1 is not Python"),
        ("raise SystemExit(3)\ndef f(p, e): return 1", "the file cannot be run: SystemExit: 3"),
        ("import no_such_thing\ndef f(p, e): return 1", "a metric's file stands alone, beside installed packages"),
        ("def d(g): return None\n@d\ndef f(p, e): return 1", "no function f at the top"),
        ("def d(g): return lambda x: 1\n@d\ndef f(p, e): return 1", "f must take two values"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, source: str, words: str) -> None:
    path = tmp_path / "my.py"
    path.write_text(source)
    with pytest.raises(UserError) as caught:
        load(tmp_path / "run", f"{path}:f")
    assert str(caught.value).startswith(f"evaluate.metrics: {path}:f: ")
    assert words in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        metrics.check([f"{tmp_path}/none.py:f"])
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        metrics.check([f"{tmp_path}/folder.py:f"])


@pytest.mark.parametrize(
    "call", ["def f(p, e): return 1", "def f(*all): return 1", "def f(p, e, w=1, *, k=2): return 1"]
)
def test_what_may_be_called_with_two_values(tmp_path: Path, call: str) -> None:
    path = tmp_path / "my.py"
    path.write_text(call)
    (metric,) = load(tmp_path / "run", f"{path}:f")
    assert metric.score(answer("x", "y"), {}) == 1.0


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["exakt"], "'exakt' is no metric"),
        (["my.py"], "'my.py' is no metric"),
        (["my.py:not a name"], "is no metric"),
        (["exact", "exact"], "two metrics are called exact"),
        (["a.py:f", "b.py:f"], "two metrics are called f"),
        (["a.py:json"], "json is built in: give the function another name"),
    ],
)
def test_wrong_names(names: list[str], words: str) -> None:
    assert any(words in line for line in metric_names.broken(names))


def test_names_become_absolute(tmp_path: Path) -> None:
    assert metric_names.absolute("exact", tmp_path) == "exact"
    assert metric_names.absolute("a/b.py:f", tmp_path) == f"{tmp_path}/a/b.py:f"
    assert not list(metric_names.broken(Config(evaluate=EvaluateConfig()).evaluate.metrics))


# At submit.


def submitted(folder: Path, *names: str) -> Config:
    (folder / "train.jsonl").touch()
    given = Config(
        name="m",
        cluster="local",
        data=DataConfig(train="train.jsonl"),
        model=ModelConfig(build={"model_type": "x"}),
        evaluate=EvaluateConfig(metrics=list(names)),
    )
    return submit.resolve(given, folder)


def test_submitting_copies_the_file_and_keeps_where_it_was(tmp_path: Path, file: Path) -> None:
    config = submitted(file.parent, "exact", "my_metrics.py:words")
    assert config.evaluate.metrics == ["exact", f"{file}:words"]
    submit.make_run(config, tmp_path / "run")
    (_, words) = metrics.load(tmp_path / "run" / runfolder.METRIC_FILES, config.evaluate.metrics)
    assert words.score(answer("x", "one two"), {}) == 2.0


@pytest.mark.parametrize("name", ["no.py:f", "my_metrics.py:no_such"])
def test_submitting_refuses_what_is_not_there(tmp_path: Path, file: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"evaluate\.metrics: .*(cannot be read|no function no_such at the top)"):
        submitted(file.parent, name)
