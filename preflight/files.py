"""The files that a run reads: there, readable, and the same on every node."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from configs import runfolder
from configs.schema import Config
from configs.wording import counted
from preflight.setting import Setting
from preflight.states import Finding

PART = 1 << 16
"""Bytes from the beginning and from the end of each file that are compared: enough for another file and for one whose
copying stopped, not for a spoilt byte in the middle."""
MOST = 1000
"""Files of a folder that are opened: all nodes do it at once, on one file server."""


def wanted(config: Config) -> dict[str, Path]:
    """Option -> file or folder that every node must be able to read."""
    named = {"data.train": config.data.train, "data.heldout": config.data.heldout, "model.path": config.model.path}
    return {option: Path(path) for option, path in named.items() if path}


def fingerprint(path: Path) -> dict[str, str]:
    """File -> `size:sha256 of the first and the last 64 KiB`, for a file or all files below a folder.

    Of a folder with more than MOST files only their names and sizes are compared, as one sum. Raises OSError where
    something cannot be read.
    """
    if not path.is_dir():
        return {_text(path.name): _ends(path)}
    files = sorted(_below(path))
    if len(files) <= MOST:
        return {_text(file.relative_to(path).as_posix()): _ends(file) for file in files}
    listed = "\0".join(f"{_text(file.relative_to(path).as_posix())}\0{file.stat().st_size}" for file in files)
    digest = hashlib.sha256(listed.encode()).hexdigest()[:16]
    return {f"{len(files)} files": f"names and sizes:{digest}"}


def _below(folder: Path) -> Iterator[Path]:
    """All files below `folder`; a folder that cannot be listed is an OSError, which os.walk would pass over."""

    def refuse(error: OSError) -> None:
        raise error

    for found, _, names in os.walk(folder, onerror=refuse):
        yield from (file for name in names if (file := Path(found, name)).is_file())


def _text(name: str) -> str:
    """A name that any report can hold: bytes that are no UTF-8 are written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _ends(file: Path) -> str:
    with file.open("rb") as stream:
        parts = stream.read(PART)
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - PART))
        parts += stream.read(PART)
    return f"{size}:{hashlib.sha256(parts).hexdigest()[:16]}"


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
    return Finding(
        "host.files", "pass", f"{', '.join(paths)}: {counted(count, 'file')} readable", "", {"files": facts | config}
    )
