"""One file of a run folder for a colleague: what explains a failure, and no secrets.

Only what is named here goes in: no checkpoints, no data, no environment, and no code unless it is asked for. Of long
files the end is kept. What looks like a password, a key or a token is masked in every file.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from configs import runfolder

KEPT = (
    runfolder.CONFIG,
    runfolder.ATTEMPT,
    runfolder.JOB,
    runfolder.PLAN,
    runfolder.RESULT,
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
MASK = "***"

NAMED = re.compile(
    r"""(?ix) ( (?<![\w-]) [\w.-]* (?: token(?!s)|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|credential
        |authorization|private[_-]?key ) [\w.-]* ["']? \s* [:=] \s* (?:bearer\s+|basic\s+)? ["']? )
        ( (?!null\b|none\b|true\b|false\b|[\d.,]+(?![\w.])) [^\s"',;}\]]{4,} )"""
)
"""A value with a name that says what it is."""
SHAPED = re.compile(
    r"""(?x) -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
        | \b(?:hf|gh[pousr]|glpat|npm|pypi)[_-][A-Za-z0-9_-]{16,}
        | \bgithub_pat_\w{20,} | \bsk-[A-Za-z0-9_-]{16,} | \bxox[abprs]-[A-Za-z0-9-]{10,}
        | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b | \bAIza[\w-]{30,}
        | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*
        | (?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])
        | (?<=://)[^\s/@:]+:[^\s/@]+(?=@)""",
    re.DOTALL,
)
"""What is a key by its looks: of known services, private keys, 40 hexadecimal digits, a password within an address."""
BEARER = re.compile(r"(?i)(\bbearer\s+)[\w.~+/-]{8,}=*")
MIXED = re.compile(
    r"(?<![\w/+.-])(?=[A-Za-z0-9+_-]*[a-z])(?=[A-Za-z0-9+_-]*[A-Z])(?=[A-Za-z0-9+_-]*\d)[A-Za-z0-9+_-]{40,}={0,2}"
)
"""A long run of mixed letters and digits that is no path."""


def redact(text: str) -> str:
    """`text` with all that looks like a secret masked."""
    text = SHAPED.sub(MASK, text)
    text = BEARER.sub(rf"\1{MASK}", text)
    text = NAMED.sub(lambda found: found[1] + MASK, text)
    return MIXED.sub(MASK, text)


def write(run: Path, archive: Path, diagnosis: str, with_code: bool = False) -> list[str]:
    """Write the archive of `run`, which only its owner may read, and return the names that went in.

    diagnosis: goes in as diagnosis.txt. Raises OSError where a file cannot be read or the archive cannot be written.
    """
    files = [("diagnosis.txt", diagnosis), *((name, _text(path)) for name, path in _chosen(run, with_code))]
    aside = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with (
            os.fdopen(descriptor, "wb") as stream,
            gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for name, text in files:
                _add(tar, f"{run.name}/{name}", redact(text).encode())
        aside.replace(archive)
    finally:
        aside.unlink(missing_ok=True)
    return [name for name, _ in files]


def _chosen(run: Path, with_code: bool) -> Iterator[tuple[str, Path]]:
    """Regular files of `run` that may go in; what a link leads to is not of the run."""
    inside = run.resolve()
    for pattern in (*KEPT, *(CODE if with_code else ())):
        for path in sorted(run.glob(pattern)):
            if path.is_file() and path.resolve() == inside / path.relative_to(run):
                yield str(path.relative_to(run)), path


def _text(path: Path) -> str:
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        cut = path.suffix != ".json" and size > TAIL_BYTES
        if cut:
            stream.seek(size - TAIL_BYTES)
        found = stream.read().decode(errors="replace")
    return f"... the first {size - TAIL_BYTES} bytes are left out\n{found.partition(chr(10))[2]}" if cut else found


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o600
    tar.addfile(entry, io.BytesIO(content))
