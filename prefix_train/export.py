"""What a run gives away: an adapter in PEFT's format, or a whole model in transformers'.

The folder is written aside, read back, compared tensor by tensor with what was trained, and only then renamed.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor, nn

from configs import runfolder
from configs.errors import UserError
from prefix_train import anatomy, checkpoint
from prefix_train.model import audit
from prefix_train.tensors import (
    TensorError,
    check_names,
    check_plain,
    digest,
    disk_errors,
    read_tensors,
    sync,
    write_tensors,
)

RECORD = "export.json"

LEFT = re.compile(r"([0-9]+)(\.old)?\.tmp")
"""How the name of a folder written aside ends, behind the machine's: the process that writes it."""

PROCESSOR_FILES = (
    "*preprocessor_config.json",
    "processor_config.json",
    "chat_template.*",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What belongs to a model folder's processor and tokenizer."""


@dataclass(frozen=True)
class Exported:
    """What was written. digest: SHA-256 of the trained tensors under their names in training, as `tensors.digest`."""

    folder: Path
    digest: str
    tensors: int
    parameters: int


def export(
    model: nn.Module, processor: Any, trained: Mapping[str, Tensor], folder: Path, run: Path | None = None
) -> Exported:
    """Write the adapter of a PEFT model, or the whole of a transformers model of which everything is trained.

    model: as trained, sharded or not; its classes, names and configurations are used, none of its tensors but buffers.
    trained: every trained tensor by name, full, on the CPU: `full_tensors` of ranks, or `from_checkpoint`. Called by
    one process. With `run` given, a process of an earlier life raises StaleAttempt. Raises TensorError where PEFT or
    transformers would leave a tensor out or change it, UserError where `folder` holds something else.
    """
    check_names(str(folder), trained, anatomy.trainable(model))
    check_plain(trained)
    with aside(folder, run) as made:
        adapted = isinstance(model, PeftModel)
        if adapted:
            _write_adapter(model, trained, made)
        else:
            _write_model(anatomy.find(model).base, processor, trained, made)
        done = Exported(folder, digest(trained), len(trained), sum(tensor.numel() for tensor in trained.values()))
        write_record(made, done, kind="adapter" if adapted else "model")
    return done


@contextmanager
def aside(folder: Path, run: Path | None = None) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the block has ended well, and else is gone.

    What an export that was killed on this machine has left goes too. With `run` given, a process of an earlier life
    raises StaleAttempt. Raises UserError where `folder` holds something that is no export.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a new folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / RECORD).exists():
        raise UserError(f"{folder} holds something that is no export; name a new folder")
    mine = f".{folder.name}.{os.uname().nodename}."
    if folder.parent.is_dir():
        for left in folder.parent.glob(f"{glob.escape(mine)}*.tmp"):
            pid = LEFT.fullmatch(left.name.removeprefix(mine))
            # One with this process's number is of an earlier life: in a container these are often the same.
            if pid and (int(pid[1]) == os.getpid() or not psutil.pid_exists(int(pid[1]))):
                shutil.rmtree(left)
    made = folder.with_name(f"{mine}{os.getpid()}.tmp")
    made.mkdir(parents=True)
    try:
        yield made
        _settle(made)
        if run is not None:
            runfolder.check_attempt(run)
        _replace(folder, made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the disk refuses is one line. For a block of writing alone: an error of reading would be told as one."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} could not be written, and nothing was left of it: {error}") from error


def write_record(folder: Path, done: Exported, **more: str) -> None:
    """`export.json`: what was exported, by its digest; `kind` is adapter, model or merged.

    Also the SHA-256 of every weight file, which `prefix-train check` compares: logits do not show a tensor, or a row of
    one, that no example of the check uses.
    """
    record = {"digest": done.digest, "tensors": done.tensors, "parameters": done.parameters}
    runfolder.write_json(folder / RECORD, record | more | {"files": weight_files(folder)})


def weight_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of each weight file in `folder`, by its name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            found[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def from_checkpoint(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors of a checkpoint, which must be exactly those of `model`, prepared as for its training."""
    checkpoint.verify(folder)
    return dict(read_tensors(folder / checkpoint.MODEL, anatomy.trainable(model)))


def _write_adapter(model: PeftModel, trained: Mapping[str, Tensor], folder: Path) -> None:
    """`adapter_model.safetensors` and `adapter_config.json`, as PEFT's `save_pretrained` writes them."""
    name = model.active_adapter
    given = dict(trained)
    try:
        exported = get_peft_model_state_dict(model, given, name, save_embedding_layers=False)
    except KeyError as error:
        raise TensorError(f"PEFT's export does not find {error} among the trained tensors") from error
    names = {id(tensor): name for name, tensor in given.items()}
    check_names("PEFT's export", [names[id(tensor)] for tensor in exported.values()], given)
    write_tensors(folder / SAFETENSORS_WEIGHTS_NAME, exported)
    _compare(folder / SAFETENSORS_WEIGHTS_NAME, load_file(folder / SAFETENSORS_WEIGHTS_NAME), exported)

    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    base = type(model.get_base_model())
    mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


def _write_model(base: Any, processor: Any, trained: Mapping[str, Tensor], folder: Path) -> None:
    """What `from_pretrained` loads, through a skeleton: `base` itself is patched and perhaps sharded."""
    with torch.device("meta"):
        skeleton = type(base)(copy.deepcopy(base.config))
    skeleton.generation_config = base.generation_config
    check_names(type(base).__name__, trained, dict(skeleton.named_parameters()))
    buffers = dict(base.named_buffers())
    state = {name: buffers[name].detach().cpu() for name in skeleton.state_dict() if name in buffers}
    with disk_errors():
        skeleton.save_pretrained(folder, state_dict={**trained, **state})
    source = Path(base.config._name_or_path)
    # Of a GGUF file it is the folder around it.
    there = base.config._name_or_path and (source / "config.json").is_file()
    write_processor(processor, folder, source if there else None)
    again, keys = type(base).from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    audit(folder, keys)
    _compare(folder, dict(again.named_parameters()), trained)


def write_processor(processor: Any, folder: Path, source: Path | None) -> None:
    """A processor's or tokenizer's files.

    source: the folder of its model, if there is one. Its own files are taken to the byte: what this environment cannot
    load (video) is kept too.
    """
    with disk_errors():
        processor.save_pretrained(folder)
    for file in [] if source is None else chain.from_iterable(map(source.glob, PROCESSOR_FILES)):
        shutil.copyfile(file, folder / file.name)


def _settle(folder: Path) -> None:
    """Give every file the mode that the umask gives, since safetensors makes its files for the owner alone, and wait
    until it is on the disk, which may refuse it only then."""
    mode = (folder / RECORD).stat().st_mode
    for file in filter(Path.is_file, folder.rglob("*")):
        file.chmod(mode)
        sync(file)


def _compare(where: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    check_names(str(where), found, wanted)
    for name, tensor in wanted.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise TensorError(f"{where}: {name} is not what was written")


def _replace(folder: Path, made: Path) -> None:
    """Put `made` in the place of `folder`."""
    old = made.with_suffix(".old.tmp")
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
