"""`prefix-train verify --engine stream`: every check passes, and each fails where what it checks is broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from configs import compose
from configs.errors import UserError
from configs.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    PackConfig,
    SlurmConfig,
    StreamConfig,
    TrainConfig,
)
from prefix_train import cli, collate, loss, unit
from prefix_train.stream import build, checks, head, ring, sources, walk
from prefix_train.stream.places import Choice
from prefix_train.stream.store import Store
from tests import additions, models
from tests.tiny_text import BUILD

CPU = torch.device("cpu")
EXAMPLES = 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a model of three blocks in float32 whose store is NF4."""
    folder = tmp_path_factory.mktemp("verify")
    additions.write(folder / "train.jsonl", 8)
    layers = ["linear_attention", "full_attention", "full_attention"]
    model = ModelConfig(build={**BUILD, "num_hidden_layers": 3, "layer_types": layers}, dtype="float32")
    build.build(sources.open_source(model), folder / "store", Choice("nf4", torch.float32))
    return Config(
        cluster="local",
        engine="stream",
        model=model,
        data=DataConfig(train=str(folder / "train.jsonl")),
        pack=PackConfig(max_positions=128, packs_per_update=1),
        adapter=AdapterConfig(rank=2, targets=["q_proj", "down_proj"]),
        train=TrainConfig(updates=1, loss_chunk_words=256),
        evaluate=EvaluateConfig(generate=False),
        stream=StreamConfig(store=str(folder / "store"), budget_gib=1.0, slots=2, resident_blocks="0"),
        slurm=SlurmConfig(tasks_per_node=1),
    )


def failed(config: Config) -> set[str]:
    return {check.name for check in checks.run(config, EXAMPLES, CPU, print) if not check.passed}


def test_every_check_passes(config: Config, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(compose.to_yaml(config))
    done = CliRunner().invoke(
        cli.app, ["verify", str(tmp_path / "run.yaml"), "--engine", "stream", "--examples", str(EXAMPLES), "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["passed"]
    names = [check["name"] for check in found["checks"]]
    assert len(names) == len(set(names)) == 14
    assert "14 of 14 checks passed" in done.output


def test_a_check_that_takes_long_says_what_it_is_at_and_how_long_it_will_be(config: Config) -> None:
    said: list[str] = []
    assert all(check.passed for check in checks.run(config, cli.FEW, CPU, said.append))
    assert re.fullmatch(r"reading every byte of .*/store", said[0])
    assert re.fullmatch(r"1 of 6: resident engine, \d packs?", said[1])
    names = ["no block resident", "one block resident", "all blocks resident", "autograd in float64", "one update"]
    told = [line for line in said[2:] if re.match(r"\d of 6: [^,]*, \d+ (pack|example)s?;", line)]
    assert [line.split(": ")[1].split(",")[0] for line in told] == names
    assert all(re.search(r"; about \d+:\d\d:\d\d left$", line) for line in told)


def test_by_default_few_examples_are_taken(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ways of computing 64 examples take hours on a CPU."""
    asked: list[int] = []
    monkeypatch.setattr(checks, "run", lambda config, examples, device, say: asked.append(examples) or [])
    monkeypatch.setattr(checks, "table", lambda found: "")
    (tmp_path / "run.yaml").write_text(compose.to_yaml(config))
    for more in ([], ["--examples", "64"]):
        CliRunner().invoke(cli.app, ["verify", str(tmp_path / "run.yaml"), "--engine", "stream", *more])
    assert asked == [2, 64]


def plant_order(patch: pytest.MonkeyPatch) -> None:
    """The streaming engine's gradients are off by less than rounding to float64, but not equal."""
    again = unit.again

    def slightly(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return again(layer, hidden, *args, **kwargs) * (1 + 1e-6)

    patch.setattr(walk.unit, "again", slightly)


def plant_both_wrong(patch: pytest.MonkeyPatch) -> None:
    """Both engines are equally wrong."""
    gradient = loss._logits_gradient
    patch.setattr(loss, "_logits_gradient", lambda *given: gradient(*given) * 1.05)


def plant_other_rows(patch: pytest.MonkeyPatch) -> None:
    """Another model than the source: embeddings of other words."""
    call = head.Embedding.__call__
    patch.setattr(head.Embedding, "__call__", lambda self, ids: call(self, (ids + 1) % 100))


def plant_lost_gradient(patch: pytest.MonkeyPatch) -> None:
    """One adapter gets no gradient."""
    check = checks.gradients.Coverage.check

    def lost(self: Any, norms: list[float], images: bool) -> None:
        check(self, [*norms[:-1], 0.0], images)

    patch.setattr(checks.gradients.Coverage, "check", lost)
    patch.setattr(checks.gradients.Coverage, "_is_due", lambda self, name: False)


def plant_no_step(patch: pytest.MonkeyPatch) -> None:
    """The optimizer changes nothing."""
    patch.setattr(torch.optim.AdamW, "step", lambda self: None)


def plant_third_visit(patch: pytest.MonkeyPatch) -> None:
    """Each block is visited once more than it needs to be."""
    visit = ring.Ring.visit

    def counted(self: ring.Ring, place: int) -> Any:
        self.figures.visits += 1
        return visit(self, place)

    patch.setattr(ring.Ring, "visit", counted)


def plant_no_reuse(patch: pytest.MonkeyPatch) -> None:
    """What is still in a slot is read again."""
    load = ring.Ring._load

    def twice(self: ring.Ring, loads: Sequence[Any]) -> None:
        load(self, loads)
        self.figures.reads += len(loads)

    patch.setattr(ring.Ring, "_load", twice)


def plant_cap(patch: pytest.MonkeyPatch) -> None:
    """The cap is taken for the length."""
    made = collate.collate

    def capped(*given: Any) -> Any:
        batch = made(*given)
        batch.positions = 4096
        return batch

    patch.setattr(checks, "collate", capped)


def plant_more_slots(patch: pytest.MonkeyPatch) -> None:
    """One slot more than planned."""
    init = ring.Ring.__init__
    patch.setattr(
        ring.Ring, "__init__", lambda self, source, units, slots, stay=(): init(self, source, units, slots + 1, stay)
    )


ENGINES = ("no block resident", "one block resident", "all blocks resident")


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (plant_order, {f"{name}: as the resident engine" for name in ENGINES}),
        (plant_both_wrong, {f"{name}: as autograd in float64" for name in (*ENGINES, "resident engine")}),
        (
            plant_other_rows,
            {f"{name}: as {whose}" for name in ENGINES for whose in ("the resident engine", "autograd in float64")},
        ),
        (plant_lost_gradient, {"every adapter has a gradient"}),
        (plant_no_step, {"the adapters change"}),
        (plant_third_visit, {"visits of blocks"}),
        (plant_no_reuse, {"blocks that were read"}),
        (plant_cap, {"tokens counted from tensors"}),
        (plant_more_slots, {"memory", "blocks that were read"}),
    ],
)
def test_each_check_can_fail(
    config: Config, plant: Callable[[pytest.MonkeyPatch], None], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert failed(config) == found


def test_a_store_that_was_changed_is_refused(config: Config, tmp_path: Path) -> None:
    assert config.stream.store is not None
    store = Store.open(Path(config.stream.store))
    copy = tmp_path / "store"
    copy.mkdir()
    for file in store.folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    block = store.layers[1]
    content = bytearray((copy / block.file).read_bytes())
    content[-100] ^= 1
    (copy / block.file).write_bytes(content)
    changed = replace(config, stream=replace(config.stream, store=str(copy)))
    with pytest.raises(UserError, match=r"block\.1"):
        checks.run(changed, EXAMPLES, CPU, print)


def test_another_engine_has_no_such_checks(config: Config, tmp_path: Path) -> None:
    resident = replace(config, engine="sharded", stream=StreamConfig())
    (tmp_path / "run.yaml").write_text(compose.to_yaml(resident))
    for given in (["--engine", "stream"], []):
        done = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "run.yaml"), *given])
        assert isinstance(done.exception, UserError)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_the_oracle_is_float64_within_norms_and_angles_too(family: str) -> None:
    """transformers' norms compute in float32 whatever they are given; a float64 oracle must not."""
    made: Any = models.build(family).double()
    norm = made.model.norm
    x = torch.randn(3, norm.weight.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    factor = norm.weight if family == "qwen3" else 1 + norm.weight
    right = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor
    with checks.Wide():
        found = norm(x)
        logits = made(torch.arange(9)[None]).logits
    assert found.dtype == logits.dtype == torch.float64
    assert (found - right).abs().max() < 1e-14
    assert (norm(x) - right).abs().max() > 1e-9
    assert logits.isfinite().all()
