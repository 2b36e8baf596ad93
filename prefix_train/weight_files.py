"""Whether a model folder's files of weights can be opened, before transformers does, whose errors name no file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs.errors import UserError
from configs.schema import ModelConfig
from prefix_train.stream.origin import INDEX, SINGLE, files_of

POINTER = b"version https://git-lfs"
"""How a file begins that stands where Git LFS has not put the real one."""


def check(folder: Path) -> None:
    """Raise UserError for the first file of weights of `folder` that is missing, cut off or of another format.

    Heads are read, not tensors. Weights that are kept in another format than safetensors are not looked at.
    """
    if not any((folder / name).exists() for name in (INDEX, SINGLE)) and any(folder.glob("pytorch_model*.bin")):
        return
    for file in files_of(ModelConfig(path=str(folder))):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            with file.open("rb") as content:
                pointer = content.read(len(POINTER)) == POINTER
            why = "it is a pointer of Git LFS; get the file itself with `git lfs pull`" if pointer else error
            raise UserError(f"{file} cannot be read as safetensors: {why}") from error
