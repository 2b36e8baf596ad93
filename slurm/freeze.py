"""A copy of the source in the run folder, so that the job runs what was submitted, whatever happens to the clone."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs import runfolder

PACKAGES = ("configs", "prefix_train", "preflight", "slurm")
COMMIT = "COMMIT.json"
SOURCE = Path(__file__).resolve().parents[1]
"""The folder that this very source is in."""

_NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def freeze(run: Path, source: Path = SOURCE) -> dict[str, Any]:
    """Copy the packages from `source` to run/code and write code/COMMIT.json, whose content is returned.

    `files`: sha256 over names and contents of all frozen files. `commit`: git's, None without git; `dirty`: whether
    the packages differ from it; `diff`: sha256 of that difference, untracked files left out.
    """
    code = run / runfolder.CODE
    for package in PACKAGES:
        shutil.copytree(source / package, code / package, ignore=_NOT_SOURCE)
    record = {"source": str(source), "files": tree_hash(code), **_git_state(source)}
    runfolder.write_json(code / COMMIT, record)
    return record


def tree_hash(code: Path) -> str:
    """sha256 over the relative names and contents of the packages in `code`."""
    digest = hashlib.sha256()
    for path in _files(code):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(code)}\0{len(content)}\0".encode(errors="surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


def environment(run: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a process that shall import the frozen code: run/code first, never the working folder."""
    path = [str(run / runfolder.CODE), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _files(code: Path) -> Iterator[Path]:
    for package in PACKAGES:
        paths = sorted((code / package).rglob("*"))
        yield from (path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def _git_state(source: Path) -> dict[str, Any]:
    commit = _git(source, "rev-parse", "HEAD")
    if commit is None or not _owns(source):
        return {"commit": None, "dirty": None, "diff": None}
    status = _git(source, "status", "--porcelain", "--", *PACKAGES)
    diff = _git(source, "diff", "HEAD", "--binary", "--no-ext-diff", "--", *PACKAGES)
    return {
        "commit": commit.decode().strip(),
        "dirty": bool(status),
        "diff": hashlib.sha256(diff).hexdigest() if diff else None,
    }


def _owns(source: Path) -> bool:
    """Whether the repository that git finds is this source's own, not one that an installed copy happens to lie in."""
    return bool(_git(source, "ls-files", "--", "slurm/freeze.py"))


def _git(source: Path, *arguments: str) -> bytes | None:
    """Output of git in `source`; None where there is no git or no repository."""
    try:
        found = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, check=True, timeout=30)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return found.stdout
