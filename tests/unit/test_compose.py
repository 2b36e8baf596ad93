"""configs/compose.py and configs/rules.py: what the user wrote is what the run gets, or one clear line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs import compose, other_names, rules
from configs.compose import from_run, load, options, to_yaml, with_changes
from configs.errors import UserError
from configs.schema import Config, SlurmConfig

BASE = """\
model:
  build: {model_type: qwen3}
data:
  train: train.jsonl
pack:
  packs_per_update: 2
train:
  updates: 3
"""

LETTERS = [
    "1:30:00",
    "007",
    "on",
    "1e3",
    "a #b",
    "'x'",
    '"x"',
    "null ",
    "${HOME}",
    "\\${a} ${",
    "ä\u200bß",
    "[a, b]",
    "{x",
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def mistake(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", LETTERS)
def test_override_keeps_letters(base: Path, text: str) -> None:
    config = load(base, [f"slurm.comment={text}", f"name={text}", f"slurm.extra.switches={text}"])
    assert config.slurm.comment == config.name == config.slurm.extra["switches"] == text


def test_slurm_time_keeps_letters(base: Path) -> None:
    assert load(base, ["slurm.time=1:30:00"]).slurm.time == "1:30:00"
    config = OmegaConf.structured(SlurmConfig)
    config = OmegaConf.merge(config, OmegaConf.from_dotlist(["time=1:30:00"]))
    assert config.time != "1:30:00"  # what plain OmegaConf makes of it


@pytest.mark.parametrize("text", ["1:30:00", "007", "on", "1e3", "0x10", "2026-01-01", "yes", "1_000", ".5", "${HOME}"])
def test_yaml_keeps_letters(base: Path, text: str) -> None:
    base.write_text(
        f"{BASE}name: {text}\nslurm:\n  comment: {text}\n  extra:\n    switches: {text}\n  setup:\n  - {text}\n"
    )
    config = load(base)
    assert config.name == config.slurm.comment == config.slurm.extra["switches"] == config.slurm.setup[0] == text


def test_yaml_comment_and_quotes(base: Path) -> None:
    base.write_text(f"{BASE}slurm:\n  comment: a #b\n  account: 'a #b'\n  qos: \"null\"\n  partition: null\n")
    slurm = load(base).slurm
    assert (slurm.comment, slurm.account, slurm.qos, slurm.partition) == ("a", "a #b", "null", None)


@pytest.mark.parametrize("word", sorted(compose.NULLS))
def test_a_word_for_no_value_that_was_quoted_stays_text(base: Path, word: str) -> None:
    base.write_text(f"{BASE}slurm:\n  qos: '{word}'\n")
    config = load(base)
    assert config.slurm.qos == word
    assert with_changes(config, []) == config


@settings(deadline=None, max_examples=30)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")))
@example("0E0")
@example("0o17")
def test_any_text_survives_override_and_file(text: str) -> None:
    start = Config(name=text, model=dataclasses.replace(Config().model, build={"a": {"b": [text]}}))
    start = dataclasses.replace(
        start,
        data=dataclasses.replace(start.data, train="t"),
        pack=dataclasses.replace(start.pack, packs_per_update=2),
        train=dataclasses.replace(start.train, updates=1),
    )
    if text == "???":
        return
    assert with_changes(start, [f"name={text}"]) == start
    assert with_changes(start, []) == start


@pytest.mark.parametrize("text", ["null", "none", "None", "~", ""])
def test_no_value(base: Path, text: str) -> None:
    assert load(base, ["slurm.partition=gpu", f"slurm.partition={text}"]).slurm.partition is None
    assert load(base, ["evaluate.examples=3", f"evaluate.examples={text}"]).evaluate.examples is None


def test_words_of_slurm_are_not_no_value(base: Path) -> None:
    assert load(base, ["slurm.mail_type=NONE"]).slurm.mail_type == "NONE"
    assert load(base, ["data.prepare=none", "memory.offload=none"]).memory.offload == "none"


@pytest.mark.parametrize("text", ["a,b", "a, b", "[a, b]", "['a', \"b\"]"])
def test_lists(base: Path, text: str) -> None:
    assert load(base, [f"adapter.targets={text}"]).adapter.targets == ["a", "b"]
    base.write_text(f"{BASE}adapter:\n  targets: {text}\n")
    assert load(base).adapter.targets == ["a", "b"]


def test_list_items_keep_letters(base: Path) -> None:
    config = load(base, ["slurm.setup=['module load a,b', \"export X=${HOME}\", 007, on]", "preflight.packages="])
    assert config.slurm.setup == ["module load a,b", "export X=${HOME}", "007", "on"]
    assert config.preflight.packages == []


def test_model_build_is_yaml_1_2(base: Path) -> None:
    base.write_text(
        BASE.replace(
            "build: {model_type: qwen3}", "build:\n    {a: 1, b: 1.5, c: 1e-6, d: on, e: true, f: null, g: '7'}"
        )
    )
    changed = load(base, ["model.build.text.layers=4", "model.build.h=[1, x, [2.0]]", "model.build.i=007"])
    assert changed.model.build == {
        **{"a": 1, "b": 1.5, "c": 1e-6, "d": "on", "e": True, "f": None, "g": "7"},
        **{"text": {"layers": 4}, "h": [1, "x", [2.0]], "i": 7},
    }
    assert [type(v) for v in changed.model.build["h"]] == [int, str, list]


def test_numbers_and_switches(base: Path) -> None:
    config = load(base, ["train.lr=1e-3", "train.updates=12", "memory.recompute=off", "train.epochs=null"])
    assert (config.train.lr, config.train.updates, config.memory.recompute) == (1e-3, 12, False)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trian.lr=1", "did you mean train.lr?"),
        ("train.lrr=1", "did you mean train.lr?"),
        ("lr=1", "did you mean train.lr?"),
        ("slurm.gpus=1", "did you mean slurm.gpus_per_node?"),
        ("+train.lr=1", "did you mean train.lr?"),
        ("train=1", "train is a section"),
        ("train.lr.x=1", "unknown key train.lr.x"),
        ("zzzzqqq=1", "unknown key zzzzqqq; the nearest key is"),
        ("train.lr", "expected key=value"),
        ("=1", "unknown key"),
        ("train.lr=fast", "train.lr: 'fast' is not a number: write one, as in 0.5 or 1e-4"),
        ("train.lr=nan", "not a finite number"),
        ("train.clip_norm=1e999", "not a finite number"),
        ("watch.factor= +Infinity", "not a finite number"),
        ("verify.gradient=-1_0e400", "not a finite number"),
        ("model.build=" + "[" * 3000, "nested too deeply"),
        ("run_root=a\udcff", "run_root: 'a\\udcff' is not UTF-8 at character 2"),
        ("model.build.name=\udcff", "is not UTF-8"),
        ("train.updates=1e3", "train.updates: '1e3' is not a whole number: write digits, as in 100"),
        ("train.updates=1.5", "train.updates: '1.5' is not a whole number"),
        ("memory.recompute=maybe", "memory.recompute: 'maybe' is not a switch: write true or false"),
        ("model.dtype=float16", "'float16' is not one of bfloat16, float32"),
        ("model.build=[1]", "expected a mapping"),
        ("adapter.targets=[a", "not YAML"),
        ("train.lr=null", "train.lr: 'null' is not a number"),
        ("train.epochs=two", "train.epochs: 'two' is not a number"),
        ("data.max_example_tokens=many", "data.max_example_tokens: 'many' is not a whole number"),
        ("train.learning_rate=1", "did you mean train.lr?"),
        ("learning-rate=1", "did you mean train.lr?"),
        ("train.per_device_train_batch_size=1", "did you mean pack.packs_per_update?"),
        ("data.train=???", "no value yet for data.train"),
    ],
)
def test_mistake_in_override(base: Path, override: str, says: str) -> None:
    message = mistake(load, base, [override])
    assert says in message
    assert override in message or "???" in override


def test_names_of_other_trainers_lead_to_options_and_are_none() -> None:
    known = compose.options()
    assert set(other_names.ELSEWHERE.values()) <= set(known)
    leaves = {key.rpartition(".")[2] for key in known}
    assert not leaves & set(other_names.ELSEWHERE)


@pytest.mark.parametrize("key", [key for key, kind in compose.options().items() if kind in (int, float, bool)])
def test_a_word_in_place_of_a_number_is_told_in_plain_words(base: Path, key: str) -> None:
    said = mistake(load, base, [f"{key}=abc"])
    assert f"{key}: 'abc' is not a " in said
    assert "converted" not in said


@pytest.mark.parametrize("change", ["train.updates", "train.epochs"])
def test_what_is_said_of_two_that_exclude_each_other_helps(base: Path, change: str) -> None:
    overrides = ["train.updates=3", "train.epochs=2"]
    said = mistake(load, base, overrides)
    assert f"{change}=null" in said
    load(base, [*overrides, f"{change}=null"])


@pytest.mark.parametrize(
    ("yaml_text", "says"),
    [
        ("train:\n  lrr: 3\n", ":2: unknown key train.lrr; did you mean train.lr?"),
        ("\n\ntrian:\n  lr: 3\n", ":3: unknown key trian"),
        ("train: 7\n", ":1: train is a section"),
        ("train:\n  lr: [1]\n", ":2: train.lr: expected one value"),
        ("train:\n  lr: 1\n  lr: 2\n", "train.lr"),
        ("model:\n  build: &a {x: *a}\n", "contains itself"),
        ("a: b: c\n", ":1: not YAML"),
        ("- 1\n", ":1: expected `section:`"),
        ("? [a]\n: 1\n", "not text"),
        ("model:\n  build: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_mistake_in_file(tmp_path: Path, yaml_text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml_text)
    message = mistake(load, path)
    assert says in message or (says == "train.lr" and "lr is given twice, again in line 3" in message)
    assert message.startswith(str(path))


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in mistake(load, tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\n")
    assert "not UTF-8 at byte 6" in mistake(load, tmp_path / "latin.yaml")
    assert "not a run folder" in mistake(from_run, tmp_path)
    assert "cannot be read: Is a directory" in mistake(load, tmp_path)
    assert "cannot be read: Not a directory" in mistake(load, tmp_path / "latin.yaml" / "x")
    assert "cannot be read: File name too long" in mistake(load, tmp_path / ("x" * 300))


def test_empty_file_is_all_defaults_and_names_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert "give model.path or model.build; neither is there" in mistake(load, path)


def test_missing_mark_can_be_filled(base: Path) -> None:
    base.write_text(BASE.replace("train.jsonl", "???"))
    assert "no value yet for data.train: write data.train=VALUE" in mistake(load, base)
    assert load(base, ["data.train=x"]).data.train == "x"


def test_round_trip_through_run_folder(base: Path, tmp_path: Path) -> None:
    config = load(
        base, ["name=007", "slurm.comment=null ", "train.eps=1e-8", "slurm.extra.foo=on", "slurm.setup=['a: b']"]
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_run(tmp_path) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "x"


def test_every_option_is_documented_and_addressable() -> None:
    names = list(options())
    assert "train.lr" in names
    assert len(names) == len(set(names)) > 80
    source = Path(compose.__file__).with_name("schema.py").read_text()
    assert len(re.findall(r'^    """', source, re.MULTILINE)) >= len(names)


def test_override_order_and_replacement(base: Path) -> None:
    assert load(base, ["seed=1", "seed=2"]).seed == 2
    assert load(base, ["model.build={model_type: llama, x: 2}"]).model.build == {"model_type": "llama", "x": 2}


COUNTED = ["adapter.masks=counted", "adapter.dropout=0.1", "slurm.gpus_per_node=2"]

BROKEN = [
    (["model.path=/m"], "are both given: take one back with model.path=null or model.build=null"),
    (["pack.packs_per_update=3"], "no multiple of the 2 ranks: give for example 4"),
    (["pack.packs_per_update=null"], "neither is there"),
    (["pack.examples_per_update=3"], "are both given: take one back with pack.packs_per_update=null or "),
    (["train.epochs=1"], "train.updates and train.epochs are both given: take one back with train.updates=null"),
    (["train.updates=null"], "neither is there"),
    (["train.epochs=0", "train.updates=null"], "train.epochs is 0.0: give more than 0"),
    (["train.keep_checkpoints=0"], "train.keep_checkpoints is 0: give 1 or more"),
    (["adapter.dropout=1"], "adapter.dropout is 1.0"),
    (["adapter.targets=[]"], "adapter.targets is empty"),
    (["seed=-1"], "seed is -1: give 0 or more"),
    (["model.seed=-1"], "model.seed is -1: give 0 or more"),
    (["model.seed=18446744073709551616"], "model.seed is 18446744073709551616: give 18446744073709551615 or less"),
    (["adapter.alpha=0"], "adapter.alpha is 0.0: give more than 0"),
    (["train.lr=0"], "train.lr is 0.0: give more than 0"),
    (["train.eps=0"], "train.eps is 0.0: give more than 0"),
    (["evaluate.chance=10"], "evaluate.chance is 10.0: give 1 or less"),
    (["verify.gradient=-1"], "verify.gradient is -1.0: give 0 or more"),
    (["evaluate.every=5"], "give data.heldout"),
    (["verify.examples=5"], "give data.heldout"),
    (["memory.offload=some"], "memory.offload is 'some'"),
    (["memory.offload=auto", "memory.recompute=false"], "set memory.recompute=true or memory.offload=none"),
    (["cluster=local", "slurm.nodes=2"], "set slurm.nodes=1"),
    (["slurm.gpus_per_node=4"], "give both the same number"),
    (["model.attention=flex"], "needs GPUs"),
    (["model.attention=joined"], "needs GPUs"),
    (["model.deltanet=fla"], "needs GPUs"),
    (["model.deltanet=fla_segments"], "needs GPUs"),
    (["model.deltanet=fla_forest"], "needs GPUs"),
    (["model.elementwise=liger"], "needs GPUs"),
    (["model.elementwise=fused"], "needs GPUs: give slurm.gpus_per_node, or set model.elementwise=auto"),
    (["model.heads=fused"], "needs GPUs: give slurm.gpus_per_node, or set model.heads=auto"),
    (
        [*COUNTED, "adapter.rank=65"],
        "adapter.rank=65: GPUs draw these masks for ranks up to 64; give a smaller rank or",
    ),
    ([*COUNTED, "memory.tile_rows=0"], "adapter.masks=counted with memory.tile_rows=0: GPUs draw these masks where"),
    ([*COUNTED, "memory.recompute=false"], "adapter.masks=counted with memory.recompute=false: GPUs draw these masks"),
    (["watch.save_s=9000"], "watch.save_s=9000: give more"),
    (["slurm.comment=a\nb"], "slurm.comment holds a line break"),
    (["slurm.extra.time=1"], "use slurm.time instead"),
    (["slurm.extra.cpus-per-task=1"], "use slurm.cpus_per_task instead"),
    (["slurm.container_mounts=/a:/a"], "slurm.container_mounts without slurm.container_image: give the image too"),
    (["slurm.mem=lots"], "slurm.mem is 'lots': write a number and K, M, G or T"),
    (["slurm.mem=64 G"], "slurm.mem is '64 G'"),
    (["slurm.extra.ntasks-per-node=1"], "use slurm.tasks_per_node instead"),
    (["slurm.extra.output=x"], "the suite sets --output itself"),
    (["slurm.time=\uff11:00:00"], "write minutes, h:mm:ss or d-h:mm:ss"),
    (["slurm.extra.export=NONE"], "begin with ALL"),
    (["slurm.extra.Foo=x"], "no long name"),
    (["slurm.time=soon"], "write minutes, h:mm:ss or d-h:mm:ss"),
    (["slurm.time=0:01:00"], "give more time"),
    (["slurm.time=0:01:00", "cluster=local"], "give more time"),
]


@pytest.mark.parametrize(("overrides", "says"), BROKEN)
def test_rules(base: Path, overrides: list[str], says: str) -> None:
    message = mistake(load, base, overrides)
    assert says in message
    assert message.startswith(str(base))


@pytest.mark.parametrize(
    "change", ["adapter.dropout=0", "adapter.masks=drawn", "slurm.gpus_per_node=0", "train.trainable=all"]
)
@pytest.mark.parametrize("wide", ["adapter.rank=65", "memory.tile_rows=0", "memory.recompute=false"])
def test_counted_masks_bind_nothing_where_no_gpu_draws_them(base: Path, change: str, wide: str) -> None:
    assert load(base, [*COUNTED, "adapter.rank=64"]).adapter.masks == "counted"
    assert load(base, [*COUNTED, wide, change]).adapter.targets


def test_rules_of_sbatch_do_not_bind_other_clusters(base: Path) -> None:
    assert load(base, ["cluster=local", "slurm.extra.output=x"]).ranks == 2
    assert load(base, ["cluster=debug", "slurm.time=1", "pack.packs_per_update=1"]).ranks == 1


def test_every_limited_option_exists() -> None:
    assert {*rules.AT_LEAST, *rules.AT_MOST, *rules.ABOVE_ZERO, *rules.FRACTIONS} <= set(options())
    assert {f"watch.{name}" for name in rules.DEADLINES} <= set(options())
    assert {f"slurm.{name}" for name in rules.SLURM_TEXT} <= set(options())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("2:30", 150), ("1:30:00", 5400), ("1-0", 86400), ("1-2:3", 93780), ("1-2:3:4", 93784)],
)
def test_time_limit(text: str, seconds: int) -> None:
    assert rules.time_limit_s(text) == seconds


def test_composing_needs_no_torch() -> None:
    code = "import sys, configs.compose; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_within_an_option_cannot_have_a_dot(base: Path) -> None:
    assert "slurm.extra.a.b: no name within it can have a dot" in mistake(load, base, ["slurm.extra.a.b=x"])
