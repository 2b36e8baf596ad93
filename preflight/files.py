"""The files that a run reads: there, readable, and the same on every node."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from configs import runfolder
from configs.schema import Config
from preflight.setting import Setting
from preflight.states import Finding

PART = 1 << 16
"""Bytes from the beginning and from the end of each file that are compared: enough for another file and for one whose
copying stopped, not for a spoilt byte in the middle."""


def wanted(config: Config) -> dict[str, Path]:
    """Option -> file or folder that every node must be able to read."""
    named = {"data.train": config.data.train, "data.heldout": config.data.heldout, "model.path": config.model.path}
    return {option: Path(path) for option, path in named.items() if path}


def fingerprint(path: Path) -> dict[str, str]:
    """File name -> `size:sha256 of the first and the last 64 KiB`, for a file or the files directly in a folder.

    Raises OSError where one cannot be read.
    """
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = {}
    for file in files:
        with file.open("rb") as stream:
            parts = stream.read(PART)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - PART))
            parts += stream.read(PART)
        found[file.name] = f"{size}:{hashlib.sha256(parts).hexdigest()[:16]}"
    return found


def check_files(setting: Setting) -> Finding:
    """Data and model, from this node."""
    facts: dict[str, dict[str, str]] = {}
    paths = wanted(setting.config) if setting.run else {}
    for option, path in paths.items():
        try:
            facts[option] = fingerprint(path)
        except OSError as error:
            return Finding("host.files", "fail", f"{option}: {error.filename}: {error.strerror}",
                           "is its file system mounted here, and may the job's user read it?")  # fmt: skip
    if not paths:
        return Finding("host.files", "pass", "no run folder, so no files to read")
    config = {runfolder.CONFIG: fingerprint(setting.folder / runfolder.CONFIG)}
    count = sum(len(files) for files in facts.values())
    return Finding("host.files", "pass", f"{', '.join(paths)}: {count} files readable", "", {"files": facts | config})
