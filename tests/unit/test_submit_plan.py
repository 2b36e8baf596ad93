"""What submitting tells of the plan."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import console
from configs.schema import Config
from prefix_train import budget, cli, lengths, plan_summary
from slurm import planned, submit
from tests import chats, exported
from tests.submissions import composed


def with_index(tmp_path: Path, count: int, *overrides: str) -> Config:
    """A configuration whose data has a length index: a shared beginning of 50 tokens, then 2 for each example."""
    (tmp_path / "train.jsonl").write_text("{}\n" * count)
    config = composed(
        tmp_path, f"data.train={tmp_path}/train.jsonl", f"run_root={tmp_path}/runs", "pack.max_positions=96", *overrides
    )
    rows = [
        SimpleNamespace(source=f"train.jsonl:{i}", keys=np.r_[np.ones(50, int), -i, i], target=np.arange(52) > 50)
        for i in range(1, count + 1)
    ]
    lengths.write(lengths.index_path(config), lengths.build(config, rows))
    return config


def test_updates_of_epochs_that_differ_are_told_as_those_of_the_first(tmp_path: Path) -> None:
    """An example that makes one pack more now and then makes one update more; else every epoch has as many."""
    config = with_index(tmp_path, 64, "train.updates=null", "train.epochs=2")
    for total, said in (
        (2, "plan    2 updates, 1 per epoch; "),
        (3, "plan    3 updates, 1 in the first of 2 epochs; "),
    ):
        found = planned.sketch(config)
        found["known"]["updates_in_run"] = total
        assert planned.lines(config, found)[0].startswith(said)
        told = plan_summary.summary(lengths.run_plan(config, lengths.load(config)).epoch(0))
        per_epoch = "per epoch" if total == 2 else "in the first of 2 epochs, 3 in all,"
        text = plan_summary.told(told | {"updates_in_run": total, "epochs": 2.0})
        assert f"\nupdates       1 {per_epoch} on {config.ranks} ranks: 16 packs and 64 examples per update\n" in text


def test_plan_is_told_from_the_length_index(tmp_path: Path) -> None:
    config = with_index(tmp_path, 64, "memory.offload=auto")
    found = planned.sketch(config)["known"]
    assert (found["examples"], found["logical_tokens"], found["updates_in_run"]) == (64, 64 * 52, 3)
    assert found["positions"] == found["packs"] * 50 + 128
    plan, memory = planned.lines(config, {"known": found})
    assert plan.startswith("plan    3 updates, 1 per epoch; 64 examples in")
    expected = budget.predict(config, lengths.largest_pack(config, lengths.load(config)))
    sizes = {"gpu_bytes": expected.total("gpu"), "host_bytes_per_node": expected.total("host")}
    assert found["memory"] == {"positions": expected.shape.positions, **sizes}
    assert sizes["host_bytes_per_node"] > 0
    gpu, host = (size / budget.GIB for size in sizes.values())
    assert memory == (
        f"memory  {gpu:.1f} GiB on each GPU, {host:.1f} GiB pinned on each node, predicted for the largest pack "
        f"({expected.shape.positions} positions)"
    )


def test_much_data_is_counted_not_planned_and_memory_is_that_of_one_full_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "MOST_EXAMPLES", 63)
    config = with_index(tmp_path, 64, "memory.offload=auto")
    found = planned.sketch(config)["known"]
    expected = budget.predict(config)
    sizes = {"gpu_bytes": expected.total("gpu"), "host_bytes_per_node": expected.total("host")}
    counted = {"examples": 64, "logical_tokens": 64 * 52, "least_positions": 50 + 128}
    assert found == {**counted, "memory": {"positions": 96, **sizes}}
    plan, memory = planned.lines(config, {"known": found})
    assert plan.startswith("plan    64 examples of 3,328 tokens, 178 positions at best; packs and updates:")
    gpu, host = (size / budget.GIB for size in sizes.values())
    assert memory == (
        f"memory  {gpu:.1f} GiB on each GPU, {host:.1f} GiB pinned on each node, predicted for one example as long as "
        "pack.max_positions (96 positions)"
    )


def test_without_a_fitting_index_it_is_said_why(tmp_path: Path) -> None:
    found = planned.sketch(composed(tmp_path, f"run_root={tmp_path}"))
    assert "there is no length index yet" in found["unknown"]
    plan, memory = planned.lines(Config(), found)
    assert plan == f"plan    {planned.NO_INDEX}"
    assert memory == "memory  not known without a plan"
    config = with_index(tmp_path, 8)
    Path(config.data.train).write_text("changed")
    assert "was made for something else: data" in planned.lines(config, planned.sketch(config))[0]


@pytest.mark.parametrize("model", ["m", "../here/m", "package:carrier_of_models/m"])
def test_the_plan_of_relative_paths_is_found_when_submitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    here, carrier = tmp_path / "here", tmp_path / "carrier_of_models"
    for folder in (here, carrier):
        folder.mkdir()
    exported.text_folder((carrier if model.startswith("package:") else here) / "m")
    (carrier / "__init__.py").touch()
    chats.write(tmp_path / "d.jsonl", [chats.row(f"Which is {n}?") for n in range(4)])
    config = {
        "cluster": "local",
        "model": {"path": model},
        "data": {"train": "../d.jsonl"},
        "pack": {"packs_per_update": 1},
        "train": {"updates": 1},
        "slurm": {"tasks_per_node": 1},
    }
    (here / "c.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(tmp_path))
    cli.plan_command(Path("c.yaml"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        console.run(submit.app, ["c.yaml", "--dry-run"])
    told = capsys.readouterr()
    assert (ended.value.code, told.err) == (0, "")
    assert "\nplan    1 update, 1 per epoch; 4 examples in" in told.out
