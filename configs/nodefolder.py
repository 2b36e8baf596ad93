"""This user's own folder on a node's own disk: for compiled kernels and for what a watcher reads of a rank."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def private_folder() -> Path:
    """The folder, made where it is not there; its files are this user's alone.

    Kernels are code: nobody else may be able to write there. Raises PermissionError where somebody could.
    """
    folder = Path(tempfile.gettempdir()) / f"prefix-train-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022 or folder.is_symlink():
        raise PermissionError(f"{folder} is not this user's own: others could plant kernels in it; remove it")
    return folder
