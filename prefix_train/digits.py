"""The demonstration's data: scikit-learn's handwritten digits as PNG files, and chat examples under two instructions.

`register` (about 1,500 tokens) asks for the digit and its parity. `survey` (about 900) asks for the digit in words and
whether it has a closed loop, and goes on into a shared first turn with a worked example, so that a prefix holds an
image. Each scan is asked under one of the two, in turn.
"""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from configs import runfolder
from configs.errors import UserError

TRAIN, HELDOUT = "train.jsonl", "heldout.jsonl"

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CLOSED_LOOP = frozenset({0, 6, 8, 9})

TRAIN_SCANS = 1500
"""Scans in the training split, the worked example's included; the other 297 are held out."""

WORKED_EXAMPLE = 1719
"""A seven of the training split that `survey` shows to everybody and nobody is asked about."""

SIDE = 32
"""Pixels: with patches of 8, merged 2 x 2, an image is 4 tokens."""


def write_digits(folder: Path) -> dict[str, int]:
    """Write `images/`, `heldout.jsonl` and, last, `train.jsonl` into `folder`; returns examples per JSONL file."""
    return write_files(folder, _files())


def write_files(folder: Path, files: dict[str, bytes]) -> dict[str, int]:
    """Write `files`, by path below `folder`, `train.jsonl` last; returns examples per JSONL file.

    What is there already is kept, so an interrupted run is completed by the next one. Raises UserError, before
    anything is written, where a file of the same name holds something else.
    """
    for name, content in files.items():
        path = folder / name
        if path.exists() and path.read_bytes() != content:
            raise UserError(f"{path} is not what the demonstration writes: remove it, or name another folder")
    missing = [name for name in files if not (folder / name).exists()]
    with ThreadPoolExecutor(8) as pool:  # each file is synced to the disk, which waits
        list(pool.map(lambda name: _put(folder / name, files[name]), [n for n in missing if n not in (TRAIN, HELDOUT)]))
    for name in (HELDOUT, TRAIN):
        if name in missing:
            _put(folder / name, files[name])
    return {name: files[name].count(b"\n") for name in (TRAIN, HELDOUT)}


def _files() -> dict[str, bytes]:
    """Everything that the demonstration consists of, by path below its folder."""
    data = load_digits()
    train, heldout = _split(len(data.target))
    files = {_image(index): _png(scan) for index, scan in enumerate(data.images)}
    for name, scans in ((HELDOUT, heldout), (TRAIN, train)):
        rows = (_example(turn, index, int(data.target[index])) for turn, index in enumerate(scans))
        files[name] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return files


def _split(scans: int) -> tuple[list[int], list[int]]:
    """Scans of the training and of the held-out examples, each in a fixed random order."""
    order = np.random.RandomState(0).permutation(scans).tolist()  # its stream is frozen for ever, a Generator's is not
    return [scan for scan in order[:TRAIN_SCANS] if scan != WORKED_EXAMPLE], order[TRAIN_SCANS:]


def _example(turn: int, scan: int, digit: int) -> dict[str, Any]:
    """One chat record about `scan`, under the instruction that is next in turn."""
    name, answer = (("register", _register), ("survey", _survey))[turn % 2]
    messages = [{"role": "system", "content": _instruction(name)}]
    if name == "survey":
        messages += _turn(WORKED_EXAMPLE, _survey(7))
    return {"id": f"{name}-{scan:04d}", "messages": messages + _turn(scan, answer(digit))}


def _turn(scan: int, answer: str) -> list[dict[str, Any]]:
    image = {"type": "image", "image": _image(scan)}
    return [{"role": "user", "content": [image]}, {"role": "assistant", "content": answer}]


def _register(digit: int) -> str:
    return json.dumps({"digit": digit, "parity": "odd" if digit % 2 else "even"})


def _survey(digit: int) -> str:
    return json.dumps({"word": WORDS[digit], "closed_loop": digit in CLOSED_LOOP})


def _instruction(name: str) -> str:
    return resources.files("prefix_train").joinpath("demo", f"{name}.md").read_text(encoding="utf-8").strip()


def _image(scan: int) -> str:
    return f"images/{scan:04d}.png"


def _png(scan: np.ndarray[Any, Any]) -> bytes:
    """PNG of a scan of 8 x 8 cells with values from 0 to 16, enlarged to SIDE x SIDE grey pixels."""
    cells = Image.fromarray((scan * (255 / 16)).round().astype(np.uint8))
    stream = io.BytesIO()
    cells.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(stream, "PNG")
    return stream.getvalue()


def _put(path: Path, content: bytes) -> None:
    runfolder.write_aside(path, lambda stream: stream.write(content))
