"""Exports load into plain PEFT and transformers and give the same logits; what would be lost is an error."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from configs import runfolder
from configs.errors import UserError
from configs.schema import Config
from prefix_train import anatomy, checkpoint, export, tensors, tiny
from prefix_train.dist import Ranks
from prefix_train.tensors import TensorError, digest
from tests import models, trained

ALONE = Ranks(0, 1, torch.device("cpu"), None)


def full(model: nn.Module) -> dict[str, Tensor]:
    return tensors.full_tensors(anatomy.trainable(model))


def inputs(family: str) -> dict[str, Tensor]:
    given = trained.inputs(0)
    return given if family in models.WITH_VISION else {"input_ids": given["input_ids"]}


@torch.no_grad()
def logits(model: nn.Module, family: str) -> Tensor:
    return model.eval()(**inputs(family), use_cache=False).logits


def plain(family: str, folder: Path) -> PeftModel:
    """What a user does: the untouched model, and PEFT's own loader; a warning would be a tensor that is missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*")
        return PeftModel.from_pretrained(models.build(family), folder)


@pytest.mark.parametrize("family", list(models.FAMILIES))
def test_an_adapter_loads_into_the_plain_model(tmp_path: Path, family: str) -> None:
    model = trained.adapted(family)
    with torch.no_grad():
        for name, parameter in anatomy.trainable(model).items():
            if "merger" in name:
                parameter.mul_(1.5)
    before = logits(models.build(family), family)
    wanted = logits(model, family)
    assert (wanted - before).abs().max() > 1e-2, "the adapter does something"
    done = export.export(model, None, full(model), tmp_path / "adapter")
    given = logits(plain(family, tmp_path / "adapter"), family)
    assert (given - wanted).abs().max() <= 1e-5
    assert done.digest == digest(anatomy.trainable(model))
    assert json.loads((done.folder / export.RECORD).read_text())["digest"] == done.digest
    stored = load_file(done.folder / "adapter_model.safetensors")
    assert len(stored) == done.tensors == len(anatomy.trainable(model))
    assert sum(tensor.numel() for tensor in stored.values()) == done.parameters
    config = json.loads((done.folder / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == type(models.build(family)).__name__
    assert config["inference_mode"] is True


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_an_adapter_in_bfloat16_differs_by_no_more_than_bfloat16_does(tmp_path: Path, family: str) -> None:
    model = trained.adapted(family)
    export.export(model, None, full(model), tmp_path / "adapter")
    truth = logits(model, family)
    ours = logits(model.to(torch.bfloat16), family).float()
    base = models.build(family, torch.bfloat16)
    loaded = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"), family).float()
    error = (ours - truth).norm()
    assert error > 0
    assert (loaded - truth).norm() <= 1.2 * error


def test_from_a_checkpoint_in_a_fresh_process(tmp_path: Path) -> None:
    model = trained.adapted()
    optimizer = trained.adamw(model)
    trained.train(model, optimizer, range(2))
    cursor = checkpoint.Cursor(update=2, epoch=0, done=2, plan="a" * 64)
    folder = checkpoint.save(tmp_path, ALONE, anatomy.trainable(model), optimizer, cursor, Config())
    fresh = trained.adapted(seed=5)
    done = export.export(fresh, None, export.from_checkpoint(folder, fresh), tmp_path / "adapter")
    assert done.digest == digest(anatomy.trainable(model))
    given = logits(plain("qwen3_5", done.folder), "qwen3_5")
    assert (given - logits(model, "qwen3_5")).abs().max() <= 1e-5
    with pytest.raises(TensorError, match="missing"):
        export.from_checkpoint(folder, trained.adapted("llama"))


def wrap(model: PeftModel) -> None:
    """The fault: layers wrapped for recomputation."""
    found = anatomy.find(model)
    for index, layer in enumerate(found.layers):
        found.decoder.layers[index] = checkpoint_wrapper(layer)


def test_r28_wrapped_modules_are_refused(tmp_path: Path) -> None:
    model = trained.adapted()
    wrap(model)
    with pytest.raises(TensorError, match=r"_checkpoint_wrapped_module\) hides its parameters"):
        export.export(model, None, full(model), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_r28_fails_without_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's own save loses most tensors without an error, and ours without its check writes names nobody loads."""
    model = trained.adapted()
    wanted = logits(model, "qwen3_5")
    wrap(model)
    model.save_pretrained(tmp_path / "peft")
    assert len(load_file(tmp_path / "peft" / "adapter_model.safetensors")) == 6 < len(anatomy.trainable(model)) == 22
    monkeypatch.setattr(export, "check_plain", lambda names: None)
    export.export(model, None, full(model), tmp_path / "ours")
    for folder in (tmp_path / "peft", tmp_path / "ours"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModel.from_pretrained(models.build("qwen3_5"), folder)
        assert (logits(loaded, "qwen3_5") - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("lost", ["lora_A", "lora_B", "merger", ""])
def test_r28_what_peft_leaves_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    model = trained.adapted()
    original = export.get_peft_model_state_dict

    def faulty(*args: object, **kwargs: object) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in original(*args, **kwargs).items() if lost not in name}

    monkeypatch.setattr(export, "get_peft_model_state_dict", faulty)
    with pytest.raises(TensorError, match=rf"PEFT's export does not hold exactly .* missing .*{lost}"):
        export.export(model, None, full(model), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_write_is_found_on_reading_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained.adapted()
    original = export.write_tensors

    def faulty(path: Path, named: dict[str, Tensor]) -> None:
        named = {name: tensor.clone() for name, tensor in named.items()}
        next(iter(named.values())).view(-1)[0] += 1e-7
        original(path, named)

    monkeypatch.setattr(export, "write_tensors", faulty)
    with pytest.raises(TensorError, match="is not what was written"):
        export.export(model, None, full(model), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", list(models.FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_loads_with_identical_tensors(tmp_path: Path, family: str, tied: bool) -> None:
    model = models.build(family)
    if tied:
        model = retied(model)
    model.requires_grad_(True)
    done = export.export(model, tiny.build_tokenizer(), full(model), tmp_path / "model")
    again = type(model).from_pretrained(done.folder).eval()
    wanted, given = dict(model.named_parameters()), dict(again.named_parameters())
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in wanted.items())
    assert (logits(again, family) - logits(model, family)).abs().max() <= 1e-4, "alignment moves the last bits"
    config = json.loads((done.folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == ([type(model).__name__], "float32")
    assert (done.folder / "tokenizer.json").exists()
    assert done.digest == digest(anatomy.trainable(again.requires_grad_(True)))


def retied(model: nn.Module) -> nn.Module:
    """The same model with its head tied to its embeddings."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
    again = type(model)(config)
    again.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if "lm_head" not in name}, strict=False
    )
    if hasattr(again.get_decoder().config, "num_experts"):
        again.set_experts_implementation("eager")
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    return again


def test_the_processor_is_saved_with_a_vision_model(tmp_path: Path) -> None:
    model = models.build("qwen3_5").requires_grad_(True)
    done = export.export(model, tiny.build_processor(model.config), full(model), tmp_path / "model")
    processor = tiny.load_processor(done.folder)
    assert processor.image_processor.patch_size == models.PATCH


def test_a_source_folders_processor_files_are_kept_to_the_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    made = models.build("qwen3_5")
    made.save_pretrained(source)
    tiny.build_processor(made.config).save_pretrained(source)
    video = b'{"what this environment": "cannot load"}'
    (source / "video_preprocessor_config.json").write_bytes(video)
    model = type(made).from_pretrained(source).requires_grad_(True)
    done = export.export(model, tiny.load_processor(source), full(model), tmp_path / "model")
    assert (done.folder / "video_preprocessor_config.json").read_bytes() == video
    assert (done.folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert load_file(done.folder / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()


def test_others_may_read_an_export(tmp_path: Path) -> None:
    model = trained.adapted()
    done = export.export(model, None, full(model), tmp_path / "adapter")
    (tmp_path / "usual").touch()
    assert {file.stat().st_mode for file in done.folder.iterdir()} == {(tmp_path / "usual").stat().st_mode}


def test_a_folder_of_templates_within_an_export_stays_one(tmp_path: Path) -> None:
    """Tokenizers with several chat templates make one; a mode for files would close it."""
    with export.aside(tmp_path / "model") as made:
        (made / "additional_chat_templates").mkdir()
        (made / "additional_chat_templates" / "tools.jinja").touch(mode=0o600)
        (made / export.RECORD).touch(mode=0o640)
    within = tmp_path / "model" / "additional_chat_templates"
    assert within.stat().st_mode & 0o100
    assert (within / "tools.jinja").stat().st_mode == (tmp_path / "model" / export.RECORD).stat().st_mode


@pytest.mark.parametrize(
    ("raised", "number"),
    [
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 28),
        (Exception("Disk quota exceeded (os error 122)"), 122),
        (SafetensorError("InvalidTensorView"), None),
        (ValueError("of something else (os error 28)"), None),
    ],
)
def test_what_the_disk_refuses_to_libraries_in_rust(raised: Exception, number: int | None) -> None:
    with pytest.raises(OSError if number else type(raised)) as found, tensors.disk_errors():
        raise raised
    assert getattr(found.value, "errno", None) == number


def test_replacing_an_export_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained.adapted()
    folder = tmp_path / "adapter"
    first = export.export(model, None, full(model), folder)
    changed = {name: tensor + 1 for name, tensor in full(model).items()}
    assert export.export(model, None, changed, folder).digest != first.digest
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("text")
    with pytest.raises(UserError, match="thesis holds something that is no export"):
        export.export(model, None, changed, tmp_path / "thesis")
    (tmp_path / runfolder.ATTEMPT).write_text("1")
    with pytest.raises(runfolder.StaleAttempt):
        export.export(model, None, full(model), folder, run=tmp_path)
    assert json.loads((folder / export.RECORD).read_text())["digest"] == digest(changed)


@pytest.mark.parametrize("ending", [".tmp", ".old.tmp"])
def test_what_an_earlier_life_with_the_same_pid_left_goes(tmp_path: Path, ending: str) -> None:
    """In containers, where every life counts its processes anew under the same host name."""
    for _ in range(2):
        left = tmp_path / f".adapter.{os.uname().nodename}.{os.getpid()}{ending}"
        left.mkdir()
        (left / "adapter_model.safetensors").write_bytes(b"half")
        put(tmp_path / "adapter")
        assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_what_a_machine_with_a_longer_name_writes_stays(tmp_path: Path) -> None:
    """A node `a` beside a node `a.b`, and `a.7`, where the rest of the name is a number."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {f".adapter.{os.uname().nodename}.{rest}" for rest in (f"b.{gone.pid}.tmp", f"{gone.pid}.{gone.pid}.tmp")}
    for name in names:
        (tmp_path / name).mkdir()
    put(tmp_path / "adapter")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", *names}


def put(folder: Path) -> None:
    """An export with nothing but its record."""
    with export.aside(folder) as made:
        export.write_record(made, export.Exported(folder, "a" * 64, 0, 0), kind="adapter")


def test_other_tensors_than_the_trained_ones(tmp_path: Path) -> None:
    model = trained.adapted()
    some = full(model)
    name, _ = some.popitem()
    with pytest.raises(TensorError, match=f"missing {name}, unexpected none"):
        export.export(model, None, some, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
