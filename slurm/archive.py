"""One file of a run folder for a colleague: what explains a failure, and no secrets.

Only what is named here goes in: no checkpoints, no data, no environment, and no code unless it is asked for. Of long
files the end is kept. What looks like a password, a key or a token is masked in every file.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from pathlib import Path

from configs import runfolder
from configs.errors import UserError
from configs.redact import redact, redact_json

KEPT = (
    runfolder.CONFIG,
    runfolder.ATTEMPT,
    runfolder.JOB,
    runfolder.PLAN,
    runfolder.RESULT,
    runfolder.END,
    runfolder.METRICS,
    f"{runfolder.LIVES}/*.json",
    f"{runfolder.HEARTBEAT}/*.json",
    f"{runfolder.LOGS}/*.log",
    f"{runfolder.LOGS}/*.json",
    f"{runfolder.LOGS}/*.txt",
    f"{runfolder.LOGS}/end-*/*.txt",
    f"{runfolder.LOGS}/end-*/evidence/*.json",
    f"{runfolder.HANGS}/*/*.json",
    f"{runfolder.HANGS}/*/*.txt",
    f"{runfolder.HANGS}/*/evidence/*.json",
    f"{runfolder.PREFLIGHT}/*/*.json",
    f"{runfolder.PREFLIGHT}/*/*.txt",
)
CODE = (f"{runfolder.CODE}/**/*.py",)
TAIL_BYTES = 1 << 20
"""Of a file that may be cut; JSON is kept whole."""


def check_target(run: Path, archive: Path) -> None:
    """Raise UserError where `archive` cannot become the archive: nothing is overwritten or put into the run."""
    try:
        if archive.is_dir():
            raise UserError(f"--archive {archive} is a folder: name a file that does not exist yet, as in run.tar.gz")
        if os.path.lexists(archive):
            raise UserError(f"--archive {archive} exists already: name a file that does not exist yet")
        folder = archive.parent.resolve()
        if not folder.is_dir():
            raise UserError(f"--archive {archive}: there is no folder {archive.parent}: make it first")
    except (OSError, RuntimeError) as error:
        raise UserError(f"--archive {archive} cannot be written: {error}") from error
    if folder.is_relative_to(run.resolve()):
        raise UserError(f"--archive {archive} is within the run folder: name a file elsewhere")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--archive {archive}: the folder {archive.parent} cannot be written: name a file elsewhere")


def write(run: Path, archive: Path, diagnosis: str, with_code: bool = False) -> tuple[list[str], list[str]]:
    """Write the archive of `run`, which only its owner may read: the names that went in, and those that are links.

    diagnosis: goes in as diagnosis.txt. Raises UserError where a file cannot be read or the archive cannot be written;
    none is left then.
    """
    check_target(run, archive)
    run = run.resolve()
    chosen, links = _chosen(run, with_code)
    try:
        descriptor = os.open(archive, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        raise UserError(f"--archive {archive} cannot be written: {error.strerror}") from error
    whole = False
    try:
        with (
            os.fdopen(descriptor, "wb") as stream,
            gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            _add(tar, f"{run.name}/diagnosis.txt", redact(diagnosis))
            for name in chosen:
                text = _text(run / name)
                _add(tar, f"{run.name}/{name}", redact_json(text) if name.endswith(".json") else redact(text))
        whole = True
    except OSError as error:
        raise UserError(f"{error.filename or archive}: {error.strerror}: no archive was written") from error
    finally:
        if not whole:
            archive.unlink()
    return ["diagnosis.txt", *chosen], links


def _chosen(run: Path, with_code: bool) -> tuple[list[str], list[str]]:
    """Regular files of `run` that may go in, and links of either kind: what they lead to is not of the run."""
    files: list[str] = []
    links: list[str] = []
    for pattern in (*KEPT, *(CODE if with_code else ())):
        for path in sorted(run.glob(pattern)):
            name, kind = str(path.relative_to(run)), path.lstat()
            if path.resolve() != path or (stat.S_ISREG(kind.st_mode) and kind.st_nlink > 1):
                links.append(name)
            elif stat.S_ISREG(kind.st_mode):
                files.append(name)
    return files, links


def _text(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        cut = path.suffix != ".json" and size > TAIL_BYTES
        if cut:
            stream.seek(size - TAIL_BYTES)
        found = stream.read().decode(errors="replace")
    return f"... the first {size - TAIL_BYTES} bytes are left out\n{found.partition(chr(10))[2]}" if cut else found


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode(errors="surrogateescape")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o600
    tar.addfile(entry, io.BytesIO(content))
