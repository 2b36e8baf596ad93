"""The check of exports: passes what is right, and finds each thing that is wrong, by others' code alone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs import runfolder
from configs.errors import UserError
from configs.schema import EvaluateConfig, ModelConfig, SlurmConfig, StreamConfig
from prefix_train import export, outcome
from prefix_train.exports import check, merge
from prefix_train.exports.merge import Merging
from prefix_train.exports.run import check_export, export_run
from prefix_train.stream import build, sources
from prefix_train.stream.places import Choice
from tests import exported, models, tiny_text

MERGED = Merging(shard_bytes=60_000)


def run_in(tmp_path: Path, dtype: str = "float32", trainable: str = "adapter", built: bool = False) -> Path:
    model = ModelConfig(path=None if built else str(exported.text_folder(tmp_path / "source")), dtype=dtype)
    if built:
        model = ModelConfig(build=tiny_text.BUILD, dtype=dtype)
    return exported.run_of(tmp_path / "run", model, "", trainable, data=exported.heldout(tmp_path / "data.jsonl"))


@pytest.mark.parametrize(
    ("dtype", "trainable", "merging", "built"),
    [
        ("float32", "adapter", None, False),
        ("float32", "adapter", MERGED, False),
        ("bfloat16", "adapter", MERGED, False),
        ("bfloat16", "all", MERGED, False),
        ("float32", "all", None, True),
        ("float32", "adapter", None, True),
        ("bfloat16", "adapter", None, False),
    ],
)
def test_what_was_exported_passes(
    tmp_path: Path, dtype: str, trainable: str, merging: Merging | None, built: bool
) -> None:
    run = run_in(tmp_path, dtype, trainable, built)
    done = export_run(run, merging=merging)
    found = check_export(done.folder, run, 3)
    assert found["passed"], found
    assert (found["examples"], found["complaints"]) == (3, [])
    assert found["rows"] > 3 * 5
    if trainable == "adapter":
        assert found["training_changed"] > 0.01
    if merging is not None and dtype == "bfloat16":
        assert 0 < found["difference"] <= found["bound"] < 0.1
        assert found["bound"] == 1.5 * found["rounding_changes"] + check.BOUND
    else:
        assert found["difference"] < 1e-5 < found["bound"] <= check.BOUND
    assert "passed" in check.table(found)


def test_of_a_streamed_run_the_weights_that_were_asked_for_count(tmp_path: Path) -> None:
    """Those of its store in NF4, or the original ones; the one is not the other."""
    model = ModelConfig(path=str(exported.text_folder(tmp_path / "source")), dtype="float32")
    store = build.build(sources.open_source(model), tmp_path / "store", Choice("nf4", torch.float32))
    stream = StreamConfig(store=str(store.folder), budget_gib=1.0)
    more: dict[str, Any] = {"engine": "stream", "stream": stream, "slurm": SlurmConfig(tasks_per_node=1)}
    more["evaluate"] = EvaluateConfig(generate=False)
    run = exported.run_of(tmp_path / "run", model, data=exported.heldout(tmp_path / "data.jsonl"), **more)
    for merging in (None, MERGED, replace(MERGED, weights="store")):
        done = export_run(run, merging=merging)
        found = check_export(done.folder, run, 2)
        assert found["passed"], found
    edit(done.folder / export.RECORD, "weights", "model")
    found = check_export(done.folder, run, 2)
    assert not found["passed"]
    assert found["difference"] > 100 * found["bound"]


def test_what_transformers_keeps_in_float32_is_not_rounded_either(tmp_path: Path) -> None:
    """So that the bound is what one rounding of the files' own weights changes."""
    model = models.build("olmo_hybrid")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = exported.model_folder(tmp_path / "source", "olmo_hybrid")
    check.round_once(model, ModelConfig(path=str(source), dtype="bfloat16"))
    for name, tensor in model.state_dict().items():
        wanted = before[name] if name.endswith("A_log") else before[name].bfloat16().float()
        assert torch.equal(tensor, wanted), name
        assert "A_log" not in name or not torch.equal(tensor, tensor.bfloat16().float())


def edit(path: Path, name: str, value: Any) -> None:
    document = json.loads(path.read_text())
    assert document[name] != value
    path.write_text(json.dumps(document | {name: value}))


def retold(folder: Path, name: str, how: Any) -> None:
    """Change, or leave out, the first tensor whose name ends so."""
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for key in [key for key in sorted(tensors) if key.endswith(name)][:1]:
            made = how(tensors.pop(key))
            save_file(tensors | ({} if made is None else {key: made}), path, metadata={"format": "pt"})
            return
    raise AssertionError(name)


def moved(tensor: Tensor) -> Tensor:
    return tensor + 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor.dtype)


ADAPTER = {
    "one tensor changed": lambda folder: retold(folder, "lora_B.weight", moved),
    "one tensor lost": lambda folder: retold(folder, "lora_B.weight", lambda tensor: None),
    "another alpha": lambda folder: edit(folder / "adapter_config.json", "lora_alpha", 16),
    "rank-stabilised scaling": lambda folder: edit(folder / "adapter_config.json", "use_rslora", True),
    "a target missing": lambda folder: edit(
        folder / "adapter_config.json",
        "target_modules",
        [
            name
            for name in json.loads((folder / "adapter_config.json").read_text())["target_modules"]
            if "o_proj" not in name
        ],
    ),
}
WHOLE = {
    "one tensor changed": lambda folder: retold(folder, "o_proj.weight", moved),
    "one tensor not merged": lambda folder: retold(
        folder, "q_proj.weight", lambda tensor: load_one(folder.parent.parent / "source", "q_proj.weight")
    ),
}


def load_one(folder: Path, name: str) -> Tensor:
    return next(
        tensor
        for path in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(path).items()
        if key.endswith(name)
    )


@pytest.mark.parametrize("fault", ADAPTER)
def test_a_fault_in_an_adapter_is_found(tmp_path: Path, fault: str) -> None:
    run = run_in(tmp_path)
    done = export_run(run)
    ADAPTER[fault](done.folder)
    found = check_export(done.folder, run, 2)
    assert not found["passed"]
    assert found["difference"] > 10 * found["bound"]
    assert "FAILED" in check.table(found)


@pytest.mark.parametrize("fault", WHOLE)
def test_a_fault_in_a_merged_model_is_found(tmp_path: Path, fault: str) -> None:
    run = run_in(tmp_path)
    done = export_run(run, merging=MERGED)
    WHOLE[fault](done.folder)
    found = check_export(done.folder, run, 2)
    assert not found["passed"]
    assert found["difference"] > 10 * found["bound"]
    assert all("SHA-256" in line for line in found["complaints"])


@pytest.mark.parametrize("merging", [None, MERGED])
def test_a_change_that_no_example_sees_is_found(tmp_path: Path, merging: Merging | None) -> None:
    """A bit of one weight, and a tensor that nothing asks for: the logits stay as they are."""
    run = run_in(tmp_path)
    folder = export_run(run, merging=merging).folder
    path = min(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    save_file({"other": torch.ones(1)}, folder / "other.safetensors")
    found = check_export(folder, run, 1)
    assert found["difference"] <= found["bound"]
    assert found["complaints"] == sorted([
        f"{path.name} is not what was exported: its SHA-256 is another", "other.safetensors was not exported",
    ])  # fmt: skip
    assert not found["passed"]
    path.unlink()
    assert f"{path.name} is not there any more" in check_export(folder, run, 1)["complaints"]


def test_merging_with_a_wrong_scaling_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What read-back cannot see, for it compares with what was merged."""
    run = run_in(tmp_path, "bfloat16")
    original = merge.changes_of

    def wrong(*given: Any) -> dict[str, merge.Change]:
        return {
            name: merge.Lora(one.a, one.b, one.scaling / 2) if isinstance(one, merge.Lora) else one
            for name, one in original(*given).items()
        }

    monkeypatch.setattr(merge, "changes_of", wrong)
    done = export_run(run, merging=MERGED)
    found = check_export(done.folder, run, 2)
    assert not found["passed"]
    assert found["difference"] > found["bound"]


def test_another_chat_template_or_tokenizer_is_found(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    done = export_run(run, merging=MERGED)
    (done.folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = check_export(done.folder, run, 1)
    assert (found["passed"], found["complaints"]) == (False, ["the folder's chat template is another one"])


def test_a_folder_that_does_not_load_fails_with_its_reason(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    done = export_run(run)
    (done.folder / "adapter_model.safetensors").write_bytes(b"nothing")
    found = check_export(done.folder, run, 1)
    assert not found["passed"]
    assert found["difference"] is None
    assert found["complaints"][0].startswith("it does not load: ")


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with pytest.raises(UserError, match=r"is no export: it has no export\.json"):
        check_export(tmp_path / "source", run, 1)


@pytest.mark.parametrize("key", ["kind", "files"])
def test_an_export_of_an_earlier_version_is_refused_in_one_line(tmp_path: Path, key: str) -> None:
    run = run_in(tmp_path)
    done = export_run(run)
    record = json.loads((done.folder / export.RECORD).read_text())
    del record[key]
    (done.folder / export.RECORD).write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"adapter/export\.json does not say what kind .*`prefix-train export RUN`"):
        check_export(done.folder, run, 1)


@pytest.mark.parametrize("collected", [True, False])
def test_the_runs_model_is_gone_before_the_other_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collected: bool
) -> None:
    """One GPU need not hold both, also where a model refers to itself. It shows where nothing is collected."""
    run = run_in(tmp_path)
    done = export_run(run)
    restore, made, seen = outcome.restore, [], []

    def watched(*given: Any) -> Any:
        model, processor = restore(*given)
        model.__dict__["itself"] = model
        made.append(weakref.ref(model))
        return model, processor

    def alone(*_: Any) -> Any:
        seen.append("loaded")
        return None, {"said": []}

    monkeypatch.setattr(outcome, "restore", watched)
    monkeypatch.setattr(check, "alone", alone)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("kept" if made[0]() else "gone"))
    if not collected:
        monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    try:
        check_export(done.folder, run, 1)
    finally:
        gc.enable()
    assert seen == ["gone" if collected else "kept", "loaded"]


def test_transformers_is_found_where_the_user_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of PYTHONPATH, as module systems say it; one that says which it is stands for it here."""
    (tmp_path / "transformers.py").write_text("raise ImportError('of the module system')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check.alone({}, [], tmp_path) == (None, {"said": ["it does not load: ImportError: of the module system"]})


def test_a_process_with_the_package_in_it_is_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a user's start-up imports, as PYTHONPATH and a user's own packages can."""
    run = run_in(tmp_path)
    done = export_run(run)
    (tmp_path / "sitecustomize.py").write_text("import prefix_train.tensors")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(check.__file__).parents[2]}")
    with pytest.raises(AssertionError, match="others' alone imported prefix_train"):
        check_export(done.folder, run, 1)


def test_the_checking_program_imports_nothing_of_ours() -> None:
    """Also where the package is installed: the imports that it makes bring none of it along."""
    program = f"import sys, runpy; runpy.run_path({str(check.ALONE)!r}, run_name='alone'); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(ran.stdout.split())
    assert {"transformers", "peft"} <= loaded
    assert not {name for name in loaded if name.split(".")[0] in ("prefix_train", "configs", "slurm", "preflight")}


LOGITS = [torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 0.5]]), torch.tensor([[3.0, 1.0, 0.0]])]


def spoilt(value: float) -> list[Tensor]:
    made = [one.clone() for one in LOGITS]
    made[0][1, 2] = value
    return made


def judged(found: list[Tensor], wanted: check.Wanted) -> dict[str, Any]:
    document = check.judge(Path("merged"), {"kind": "merged"}, "bfloat16", wanted, found, [])
    json.dumps(document, allow_nan=False)
    check.table(document)
    return document


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rounded", [None, 0.1, float("inf")])
def test_logits_that_are_not_finite_never_pass(value: float, rounded: float | None) -> None:
    """On either side or both, and where the bound is infinite too."""
    bad = spoilt(value)
    for found, own in ((bad, LOGITS), (LOGITS, bad), (bad, bad)):
        assert check.difference(found, own) == float("inf")
        document = judged(found, check.Wanted(own, None, float("inf"), rounded))
        assert not document["passed"]
        assert document["difference"] is None
        whose = [name for name, logits in (("the run's own", own), ("the folder's", found)) if logits is bad]
        assert document["complaints"] == [f"{name} logits are not finite" for name in whose]
    document = judged(LOGITS, check.Wanted(LOGITS, None, None, float("inf")))
    assert (document["passed"], document["bound"], len(document["complaints"])) == (False, None, 1)
    assert judged(LOGITS, check.Wanted(LOGITS, None, None, 0.1))["passed"]


def test_logits_that_say_nothing_never_pass() -> None:
    """All the same: their norm is 0, and so is that of their difference."""
    flat = [torch.ones(2, 3), torch.ones(1, 3)]
    assert check.difference(flat, flat) == float("inf")
    assert not judged(flat, check.Wanted(flat, None, None, None))["passed"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "prefix_train.cli", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_as_commands(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    done = command("export", str(run), "--merged", "--check", "--examples", "2", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["check"]["passed"]
    assert said["folder"] == str(run / "merged")
    assert command("export", str(run)).returncode == 0
    retold(run / "adapter", "lora_A.weight", moved)
    failed = command("check", str(run / "adapter"))
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[-1] == "FAILED"
    (run / "adapter").rename(tmp_path / "elsewhere")
    lost = command("check", str(tmp_path / "elsewhere"))
    assert (lost.returncode, lost.stderr.count("\n")) == (2, 1)
    assert "say with --run RUN which run" in lost.stderr
    for wrong in (["--weights", "store"], ["--merged", "--dtype", "int4"], ["--merged", "--weights", "hub"]):
        assert command("export", str(run), *wrong).returncode == 2
    assert (run / runfolder.MERGED / export.RECORD).is_file()
