"""Save and resume a run exactly: what is trained, its optimizer, random state and place in the plan; nothing frozen.

A checkpoint is a folder `checkpoints/update-000123` of safetensors and JSON. Tensors are full (never shards), float32,
under their PEFT or transformers names, so that any number of ranks can load them. The folder is written aside, every
file synced and hashed in `manifest.json`, then renamed: a folder with the final name is complete.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from configs import runfolder
from configs.schema import Config
from prefix_train import random_state
from prefix_train.dist import Ranks
from prefix_train.tensors import (
    TensorError,
    check_names,
    check_plain,
    full_tensors,
    local,
    read_tensors,
    sha256,
    shard_like,
    sync,
    write_tensors,
)

FORMAT = 1
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.json"
STATE = "state.json"
MANIFEST = "manifest.json"

COMPLETE = re.compile(r"update-(\d{6,})")
PACKAGES = ("transformers", "peft", "numpy", "safetensors")
COMPUTING = ("seed", "engine", "model", "data", "pack", "adapter", "train", "memory")
"""Sections of the options that decide what is computed."""

DECIDE_EXAMPLES = ("data.", "model.", "pack.", "transformers ")


class CheckpointError(TensorError):
    """A checkpoint that cannot be written, read, or loaded into this model: which file or tensor, and why."""


@dataclass(frozen=True)
class Cursor:
    """The run's place in its plan."""

    update: int
    """Updates done in the run."""
    epoch: int
    """The epoch that goes on, from 0."""
    done: int
    """Updates done of that epoch's plan."""
    plan: str
    """Digest of that plan."""
    data: str = ""
    """Digest of the examples that it is a plan of."""


@dataclass(frozen=True)
class Resumed:
    """What `load` found."""

    cursor: Cursor
    changes: tuple[str, ...]
    """What differs from the process that saved, as `ranks 2 -> 1`; empty: on a CPU the next losses are bit-equal."""

    @property
    def may_have_other_data(self) -> bool:
        """Has something changed that decides what the examples are?"""
        return any(change.startswith(DECIDE_EXAMPLES) for change in self.changes)

    @property
    def line(self) -> str:
        """One line for the log."""
        same = "same ranks, threads, versions and options"
        return f"resumed after update {self.cursor.update}: " + (
            f"{', '.join(self.changes)}: not bit-equal" if self.changes else same
        )


def save(
    run: Path,
    ranks: Ranks,
    trainable: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    cursor: Cursor,
    config: Config,
) -> Path:
    """Write the checkpoint of `cursor.update`, then drop the oldest beyond `train.keep_checkpoints`; its folder.

    Every rank calls it with the same names: shards are gathered one tensor at a time, rank 0 writes.
    `trainable`: every trained float32 parameter by its name, taken right after sharding: a forward pass without
    backward leaves gathered copies in their place. Raises CheckpointError on every rank where rank 0 cannot write,
    and StaleAttempt on rank 0 where the run has gone on to a later life; earlier checkpoints stay as they are.
    """
    _check_trainable(trainable, optimizer)
    first = ranks.rank == 0
    files = {MODEL: full_tensors(trainable, keep=first)}
    moments, entries = _moments(trainable, optimizer)
    files[OPTIMIZER] = full_tensors(moments, keep=first)
    texts = {
        RANDOM: ranks.gather(random_state.capture()),
        STATE: {
            "format": FORMAT,
            "attempt": runfolder.process_attempt(),
            "cursor": asdict(cursor),
            "optimizer": {"class": type(optimizer).__name__, "entries": entries},
            "facts": _facts(ranks, config),
        },
    }
    final = run / runfolder.CHECKPOINTS / f"update-{cursor.update:06d}"
    failed = f"rank 0 could not write {final}" if first else None
    try:
        if first:
            _write(run, final, files, texts)
            _prune(run, config.train.keep_checkpoints)
            failed = None
    except CheckpointError as error:
        failed = str(error)
        raise
    finally:
        told = ranks.gather(failed)[0]
    if told is not None:
        raise CheckpointError(told)
    return final


def complete(run: Path) -> list[Path]:
    """Folders of the complete checkpoints, oldest first."""
    found = {int(match[1]): path for path in _entries(run) if (match := COMPLETE.fullmatch(path.name))}
    return [found[update] for update in sorted(found)]


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint, every byte verified; none: there is none.

    What a killed save left behind does not count. Raises CheckpointError where the newest complete one is damaged:
    going back to an older one is for a person to decide.
    """
    folders = complete(run)
    if not folders:
        return None
    verify(folders[-1])
    return folders[-1]


def load(
    folder: Path, ranks: Ranks, trainable: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, config: Config
) -> Resumed:
    """Put the checkpoint in `folder` into `trainable`, `optimizer` and this process's random state.

    Every rank calls it; none waits for another. The number of ranks may differ from that at saving. Random state is
    restored only with the same number of ranks. Raises CheckpointError where the names, shapes or the optimizer are
    not exactly those saved.
    """
    _check_trainable(trainable, optimizer)
    state = read_state(folder)
    for name, tensor in read_tensors(folder / MODEL, trainable):
        with torch.no_grad():
            local(trainable[name]).copy_(local(shard_like(tensor, trainable[name])))
    _load_optimizer(folder, state["optimizer"], trainable, optimizer)
    saved, now = state["facts"], _facts(ranks, config)
    if saved["ranks"] == now["ranks"]:
        random_state.restore(runfolder.read_json(folder / RANDOM)[ranks.rank])
    return Resumed(Cursor(**state["cursor"]), tuple(_changes(saved, now)))


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint. Raises CheckpointError where it has another format."""
    state: dict[str, Any] = runfolder.read_json(folder / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder / STATE}: format {state.get('format')!r}; this version reads {FORMAT}")
    return state


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest; CheckpointError names the first that differs."""
    advice = f"; move {folder} away to go back to the checkpoint before it"
    try:
        manifest = runfolder.read_json(folder / MANIFEST)
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder / MANIFEST} is missing{advice}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error!r}){advice}") from error
    check_names(f"{folder / MANIFEST}", entries, (MODEL, OPTIMIZER, RANDOM, STATE))
    for name, (size, expected) in entries.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing{advice}")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {size}{advice}")
        if sha256(path) != expected:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not its manifest's{advice}")


def _check_trainable(trainable: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError unless the names are plain, everything is trained in float32 and by this optimizer."""
    if not trainable:
        raise CheckpointError("nothing is trained: a checkpoint would be empty")
    check_plain(trainable)
    for name, tensor in trainable.items():
        if tensor.dtype != torch.float32 or not tensor.requires_grad:
            kind = f"{tensor.dtype}, requires_grad={tensor.requires_grad}"
            raise CheckpointError(f"{name} is {kind}; a checkpoint holds trained float32 parameters only")
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(parameter) for parameter in stepped} != {id(tensor) for tensor in trainable.values()}:
        raise CheckpointError(
            f"the optimizer steps {len(stepped)} parameters, which are not the {len(trainable)} trained ones"
        )


def _moments(
    trainable: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """The optimizer's tensors as `<entry>/<parameter>`, and each parameter's entries (none before its first step)."""
    entries: dict[str, list[str]] = {}
    named: dict[str, Tensor] = {}
    for name, parameter in trainable.items():
        state = optimizer.state.get(parameter, {})
        entries[name] = sorted(state)
        for entry in entries[name]:
            if not isinstance(state[entry], Tensor):
                raise CheckpointError(f"{name}: the optimizer's {entry} is no tensor")
            named[f"{entry}/{name}"] = state[entry]
    return named, entries


def _load_optimizer(
    folder: Path, saved: Mapping[str, Any], trainable: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    path = folder / OPTIMIZER
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(f"{path}: the optimizer was {saved['class']}, it is {type(optimizer).__name__}")
    check_names(str(path), saved["entries"], trainable)
    names = {id(parameter): name for name, parameter in trainable.items()}
    whole = optimizer.state_dict()
    whole["state"] = {}
    with safe_open(path, framework="pt") as stored:
        expected = {f"{entry}/{name}" for name, entries in saved["entries"].items() for entry in entries}
        check_names(str(path), stored.keys(), expected)
        for group, packed in zip(optimizer.param_groups, whole["param_groups"], strict=True):
            for parameter, index in zip(group["params"], packed["params"], strict=True):
                name = names[id(parameter)]
                tensors = {entry: stored.get_tensor(f"{entry}/{name}") for entry in saved["entries"][name]}
                if tensors:
                    whole["state"][index] = {
                        entry: shard_like(tensor, parameter) if tensor.shape == parameter.shape else tensor
                        for entry, tensor in tensors.items()
                    }
    optimizer.load_state_dict(whole)


def _write(run: Path, final: Path, files: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, Any]) -> None:
    aside = final.with_name(f"{final.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        for name, tensors in files.items():
            write_tensors(aside / name, tensors)
        for name, value in texts.items():
            runfolder.write_json(aside / name, value)
        written = [aside / name for name in (*files, *texts)]
        hashed = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in written}
        runfolder.write_json(aside / MANIFEST, {"files": hashed})
        sync(aside)
        runfolder.check_attempt(run)
        _publish(aside, final)
    except OSError as error:
        kept = complete(run)
        newest = f"{kept[-1].name} is intact" if kept else "there is no earlier one"
        raise CheckpointError(f"{final} could not be written: {error}; {newest}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _publish(aside: Path, final: Path) -> None:
    """Rename; where `final` is there already, from a life that saved and then was told to stop, it must be the same."""
    if final.exists():
        verify(final)
        old, new = (runfolder.read_json(folder / MANIFEST)["files"] for folder in (final, aside))
        if any(old[name] != new[name] for name in (MODEL, OPTIMIZER)):
            raise CheckpointError(f"{final} exists and holds another state of the same update; move it away")
        return
    aside.rename(final)
    sync(final.parent)


def _prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed saves left behind."""
    if keep < 1:
        raise ValueError(f"keep_checkpoints is {keep}; at least 1")
    for folder in complete(run)[:-keep]:
        folder.rename(folder.with_name(f"{folder.name}.old.tmp"))
    for folder in _entries(run):
        if folder.is_symlink() and folder.name.endswith(".tmp"):
            folder.unlink()  # a checkpoint that somebody moved elsewhere: what is there stays
        elif folder.name.endswith(".tmp"):
            shutil.rmtree(folder)


def _entries(run: Path) -> list[Path]:
    folder = run / runfolder.CHECKPOINTS
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _facts(ranks: Ranks, config: Config) -> dict[str, Any]:
    """What equal bits depend on."""
    options = asdict(config)
    return {
        "ranks": ranks.world,
        "threads": torch.get_num_threads(),
        "device": ranks.device.type,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
            "torch": torch.__version__,  # with its build: one for CUDA and one for CPUs are declared alike
        },
        "options": {name: options[name] for name in COMPUTING},
    }


def _changes(saved: Any, now: Any, name: str = "") -> Iterator[str]:
    """Leaves that differ, as `name old -> new`."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved | now:
            inner = key if name in ("", "versions", "options") else f"{name}.{key}"
            yield from _changes(saved.get(key), now.get(key), inner)
    elif saved != now:
        yield f"{name} {saved} -> {now}"
