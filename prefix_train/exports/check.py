"""An exported folder against the run that it came from: loaded by others' code alone, compared by logits.

The run's own model is its checkpoint under the package's adapters. The folder is loaded in a process that imports
transformers and PEFT and nothing of this package (`alone.py`). Both compute in float32, whatever they are stored in, on
held-out examples, one at a time. The difference of an example is the norm of its logits' difference over the norm of
its logits, each row less its mean, over the rows that predict its target; the largest counts.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from configs import runfolder
from configs.errors import UserError
from configs.modelpath import from_pretrained_arguments, locate
from configs.schema import Config, ModelConfig
from configs.wording import counted
from prefix_train import export, outcome
from prefix_train import model as models
from prefix_train.exports import merge
from prefix_train.exports.alone import UNWRITTEN
from prefix_train.render import Example
from prefix_train.tensors import disk_errors, write_tensors
from prefix_train.verify import standalone_inputs

BOUND = 1e-4
"""Largest difference that rounding in float32 may make."""

SHARE = 0.01
"""Where training changed little: no more than this share of what it changed, and at least FLOOR."""

FLOOR = 1e-5

ROUNDING = 1.5
"""A model merged in bfloat16 may differ by so many times what one rounding of the same weights changes."""

ALONE = Path(__file__).with_name("alone.py")

Logits = list[Tensor]
"""Of each example: [rows that predict its target, words]."""


@dataclass(frozen=True)
class Wanted:
    """What the run's own model says. moved: how far training took it; rounded: how far rounding to bfloat16 does.

    Either is none where it does not apply: everything was trained; the folder's weights are not in bfloat16.
    """

    logits: Logits
    tokenizer: Any
    moved: float | None
    rounded: float | None

    @property
    def bound(self) -> float:
        """Largest difference that passes."""
        if self.rounded is not None:
            return ROUNDING * self.rounded + BOUND
        return BOUND if self.moved is None else max(FLOOR, min(BOUND, SHARE * self.moved))


def check(folder: Path, config: Config, trained: Mapping[str, Tensor], examples: Sequence[Example]) -> dict[str, Any]:
    """Compare the export in `folder` with a run of `config` that ended with `trained`: a document of built-in types.

    Raises UserError where `folder` is no export.
    """
    if not (folder / export.RECORD).is_file():
        raise UserError(f"{folder} is no export: it has no {export.RECORD}; make one with `prefix-train export RUN`")
    record = runfolder.read_json(folder / export.RECORD)
    if not {"kind", "files"} <= record.keys():
        raise UserError(
            f"{folder / export.RECORD} does not say what kind of export this is, or what its files were: an earlier "
            "version wrote it; export it again with `prefix-train export RUN`"
        )
    adapter = record["kind"] == "adapter"
    dtype = config.model.dtype if adapter else runfolder.read_json(folder / "config.json")["dtype"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = record.get("weights", "model")
    wanted = own_logits(config, dict(trained), weights, examples, device, rounded=not adapter and dtype == "bfloat16")
    gc.collect()  # a model may refer to itself, and the other process needs its memory
    torch.cuda.empty_cache()
    text = None if adapter else wanted.tokenizer.decode(examples[0].ids)
    with tempfile.TemporaryDirectory() as name:
        base = base_of(config, Path(name)) if adapter else (str(folder), {})
        task = {
            "adapter": str(folder) if adapter else None,
            "base": base,
            "dtype": dtype,
            "device": str(device),
            "threads": config.train.threads,
            "examples": len(examples),
            "text": text,
        }
        found, answer = alone(task, examples, Path(name))
    complaints = list(answer["said"]) + file_complaints(folder, record["files"])
    if text is not None and found is not None:
        complaints += tokenizer_complaints(wanted.tokenizer, text, answer)
    return judge(folder, record, dtype, wanted, found, complaints)


def own_logits(
    config: Config,
    trained: dict[str, Tensor],
    weights: str,
    examples: Sequence[Example],
    device: torch.device,
    rounded: bool,
) -> Wanted:
    """The run's own model on `examples`. weights: `store` for those that the streaming engine computed with."""
    engine = config.engine if weights == "store" else "sharded"
    model, processor = outcome.restore(replace(config, engine=engine), trained, device)
    model.float()
    logits = logits_of(model, examples)
    moved, change = None, None
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            moved = difference(logits_of(model, examples), logits)
    if rounded:
        whole = model.merge_and_unload() if isinstance(model, PeftModel) else model
        round_once(whole, replace(config.model, dtype="bfloat16"))
        change = difference(logits_of(whole, examples), logits)
    return Wanted(logits, getattr(processor, "tokenizer", processor), moved, change)


def round_once(whole: nn.Module, config: ModelConfig) -> None:
    """Round each parameter to what a model of `config` stores it in, and keep it in float32."""
    dtypes = merge.dtypes_of(models.skeleton(config))
    for name, parameter in whole.named_parameters():
        parameter.data = parameter.data.to(dtypes[name]).float()


@torch.no_grad()
def logits_of(model: nn.Module, examples: Sequence[Example]) -> Logits:
    """Logits of an unpatched `model`, on the CPU."""
    device = next(model.parameters()).device
    return [model(**standalone_inputs(one, device)).logits[0, rows_of(one).to(device)].cpu() for one in examples]


def rows_of(example: Example) -> Tensor:
    """int64: the rows whose logits predict the example's target."""
    return torch.from_numpy(np.flatnonzero(example.target) - 1)


def difference(found: Logits, wanted: Logits) -> float:
    """The largest of all examples; see the head of this file. Infinite where shapes differ or a logit is not finite."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            return float("inf")
        centred = other - other.mean(-1, keepdim=True)
        apart = (one - one.mean(-1, keepdim=True)) - centred
        share = float(apart.norm() / centred.norm())
        if not math.isfinite(share):  # so is every share with a logit that is not finite
            return float("inf")
        worst = max(worst, share)
    return worst


def base_of(config: Config, folder: Path) -> tuple[str, dict[str, str]]:
    """What transformers loads as the model under an adapter; a model that a configuration builds is saved first."""
    if config.model.path is not None:
        path, more = from_pretrained_arguments(locate(config.model.path).resolve())
        return str(path), more
    model = models.load(config.model)[0]
    with _writing(folder), disk_errors():
        model.save_pretrained(folder / "base")
    return str(folder / "base"), {}


def alone(task: dict[str, Any], examples: Sequence[Example], folder: Path) -> tuple[Logits | None, dict[str, Any]]:
    """Run `task` in a process of its own, with files in `folder`: logits and what it said; none where it failed."""
    inputs: dict[str, Tensor] = {}
    for index, example in enumerate(examples):
        given = standalone_inputs(example, torch.device("cpu")) | {"rows": rows_of(example)}
        inputs |= {f"{index}/{key}": tensor for key, tensor in given.items() if isinstance(tensor, Tensor)}
    files = {key: str(folder / f"{key}.safetensors") for key in ("inputs", "out")}
    task = task | files | {"answer": str(folder / "answer.json")}
    with _writing(folder):
        write_tensors(Path(files["inputs"]), inputs)
        runfolder.write_json(folder / "task.json", task)
    ran = subprocess.run(
        # Not isolated: transformers may be the user's own, or of a module system by PYTHONPATH.
        [sys.executable, "-P", str(ALONE), str(folder / "task.json")],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    last = (ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"])[-1]
    if ran.returncode == UNWRITTEN:
        raise _no_room(folder, last)
    if ran.returncode:
        return None, {"said": [f"it does not load: {last}"]}
    answer: dict[str, Any] = runfolder.read_json(folder / "answer.json")
    if answer["ours"]:
        raise AssertionError(f"the process that should be others' alone imported {answer['ours'][0]}")
    found = load_file(files["out"])
    return [found[str(index)] for index in range(len(examples))], answer


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the disk refuses to the check is no word on the export."""
    try:
        yield
    except OSError as error:
        raise _no_room(folder, str(error)) from error


def _no_room(folder: Path, why: str) -> UserError:
    return UserError(f"{folder} could not be written: {why}; name another folder for such files: TMPDIR=FOLDER")


def file_complaints(folder: Path, written: Mapping[str, str]) -> list[str]:
    """What is no longer as it was written: a weight that no example uses makes no difference to their logits."""
    found = export.weight_files(folder)
    said = []
    for name in sorted(found.keys() | written):
        if found.get(name) != written.get(name):
            how = "is not there any more" if name not in found else "was not exported" if name not in written else ""
            said.append(f"{name} {how or 'is not what was exported: its SHA-256 is another'}")
    return said


def tokenizer_complaints(tokenizer: Any, text: str, answer: dict[str, Any]) -> list[str]:
    """What differs between the run's tokenizer and the folder's."""
    said = []
    if answer["tokens"] != tokenizer(text, add_special_tokens=False)["input_ids"]:
        said.append("the folder's tokenizer gives other tokens")
    if answer["template"] != tokenizer.chat_template:
        said.append("the folder's chat template is another one")
    return said


def judge(
    folder: Path, record: dict[str, Any], dtype: str, wanted: Wanted, found: Logits | None, complaints: list[str]
) -> dict[str, Any]:
    """What was found, against its bound."""
    complaints = complaints + infinities(wanted, found or [])
    apart = float("inf") if found is None else difference(found, wanted.logits)
    agree = [
        (one.argmax(-1) == other.argmax(-1)).float() for one, other in zip(found or [], wanted.logits, strict=False)
    ]
    return {
        "passed": apart <= wanted.bound and not complaints,
        "folder": str(folder),
        "kind": record["kind"],
        "dtype": dtype,
        "weights": record.get("weights", "model"),
        "examples": len(wanted.logits),
        "rows": sum(len(one) for one in wanted.logits),
        "difference": _finite(apart),
        "bound": _finite(wanted.bound),
        "training_changed": _finite(wanted.moved),
        "rounding_changes": _finite(wanted.rounded),
        "likeliest_agree": float(torch.cat(agree).mean()) if agree else None,
        "complaints": complaints,
    }


def infinities(wanted: Wanted, found: Logits) -> list[str]:
    """What makes a difference, or its bound, infinite."""
    said = [
        f"{whose} logits are not finite"
        for whose, logits in (("the run's own", wanted.logits), ("the folder's", found))
        if not all(bool(torch.isfinite(one).all()) for one in logits)
    ]
    if not said and not math.isfinite(wanted.bound):
        said.append("the logits of the run's own model, rounded once to bfloat16, are not finite")
    return said


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None


def table(found: dict[str, Any]) -> str:
    """The document for a person."""

    def number(key: str, form: str = ".1e") -> str:
        return "-" if found[key] is None else format(found[key], form)

    what = {"adapter": "adapter", "merged": "merged model", "model": "model"}[found["kind"]]
    rows = [
        ("logits differ by, of their norm", number("difference"), f"at most {number('bound')}"),
        ("rounding once to bfloat16 changes", number("rounding_changes"), ""),
        ("training changed", number("training_changed"), ""),
        ("rows with the same likeliest word", number("likeliest_agree", ".1%"), ""),
        ("complaints", str(len(found["complaints"])), "none"),
    ]
    head = (
        f"{found['folder']}: {what} in {found['dtype']}, loaded by transformers"
        f"{' and PEFT' if found['kind'] == 'adapter' else ''} alone; "
        f"{counted(found['examples'], 'example')}, {counted(found['rows'], 'row')}"
    )
    lines = [f"  {name:36}{figure:>10}   {bound}".rstrip() for name, figure, bound in rows]
    lines += [f"  - {line}" for line in found["complaints"]]
    return "\n".join([head, *lines, "passed" if found["passed"] else "FAILED"])
