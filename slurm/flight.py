"""NCCL's flight recorder: have a rank dump it through its pipe, and read the dump without running anything of it.

torch writes the dump as a pickle. It is read by an unpickler that refuses every global, so that only built-in
containers and scalars come out, and every value is checked before it is used. Source: torch's
torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp (DumpPipe) and FlightRecorder.hpp, format 2.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm.evidence import Collective

PIPE, DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
ENTRIES = 2000
ANSWER_S = 6.0
"""torch looks at its pipe once a second."""
LOOK_S = 0.1
MAX_BYTES = 1 << 28
STOP = b"."
"""How every pickle ends."""

DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
          "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip
KINDS = {"_all_gather_base": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
         "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
         "all_reduce_coalesced": "all_reduce", "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
         "all_reduce_barrier": "barrier"}  # fmt: skip


class NoDump(RuntimeError):
    """There is no flight recorder's dump: why."""


def environment(folder: Path, port: int) -> dict[str, str]:
    """What a rank needs before NCCL starts. folder: this user's own. port: tells apart the jobs of a node."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stem = str(folder / f"{port}-")
    return {
        "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
        PIPE: f"{stem}pipe-",
        DUMP: f"{stem}dump-",
    }


def ask(rank: int, variables: Mapping[str, str], clock_offset: float) -> tuple[Collective, ...]:
    """The last collectives of global rank `rank`, oldest first, from the rank's environment `variables`.

    clock_offset: wall clock minus CLOCK_MONOTONIC. Raises NoDump.
    """
    if PIPE not in variables or DUMP not in variables:
        raise NoDump("flight recorder: not switched on in this rank")
    dump = Path(f"{variables[DUMP]}{rank}")
    dump.unlink(missing_ok=True)
    pipe = f"{variables[PIPE]}{rank}.pipe"
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        raise NoDump(f"flight recorder: {pipe}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb", buffering=0) as stream:
        stream.write(b"1")
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        if raw := _whole(dump):
            return collectives(load(raw), clock_offset)
    raise NoDump(f"flight recorder: no answer in {ANSWER_S:g} s")


def load(raw: bytes) -> Any:
    """A dump as plain containers and scalars. Raises NoDump for anything else."""
    try:
        return _Plain(io.BytesIO(raw)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise NoDump(f"flight recorder: not a dump: {error}") from error


class _Plain(pickle.Unpickler):
    """Admits no global at all, so nothing can be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def collectives(document: Any, clock_offset: float) -> tuple[Collective, ...]:
    """The entries of a dump that are collectives, oldest first. Raises NoDump."""
    try:
        entries = sorted(document["entries"], key=lambda entry: int(entry["record_id"]))
        return tuple(_collective(entry, clock_offset) for entry in entries if not entry["is_p2p"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise NoDump(f"flight recorder: an unknown format: {type(error).__name__}: {error}") from error


def merge(device: Sequence[Collective], host: Sequence[Collective]) -> tuple[Collective, ...]:
    """`device`, from the flight recorder, with phase, update, pack and line from `host`, the ring."""
    known = {(one.group, one.number): one for one in host}
    found = []
    for one in device:
        same = known.get((one.group, one.number))
        if same is None or same.kind != one.kind:
            found.append(one)
            continue
        found.append(
            Collective(
                number=one.number,
                group=one.group,
                kind=one.kind,
                sizes=one.sizes,
                dtype=one.dtype,
                where=same.where or one.where,
                state=one.state,
                phase=same.phase,
                update=same.update,
                pack=same.pack,
                started=same.started,
                ended=one.ended,
            )
        )
    return tuple(found)


def _collective(entry: Mapping[str, Any], clock_offset: float) -> Collective:
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    over = entry["state"] == "completed"
    ended = entry.get("time_discovered_completed_ns")
    dtypes = entry["input_dtypes"]
    return Collective(
        number=int(entry["collective_seq_id"]) - 1,
        group=str(entry["process_group"][0]),
        kind=KINDS.get(name, name),
        sizes=tuple(tuple(int(size) for size in shape) for shape in entry["input_sizes"]),
        dtype=DTYPES.get(str(dtypes[0]), str(dtypes[0])) if dtypes else "",
        where=_where(entry.get("frames", ())),
        state="done" if over else "called",
        phase="",
        update=0,
        pack=-1,
        started=int(entry["time_created_ns"]) / 1e9 - clock_offset,
        ended=int(ended) / 1e9 - clock_offset if over and ended is not None else None,
    )


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame outside torch; frames are innermost first."""
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and "/torch/" not in file:
            return f"{file}:{int(frame['line'])}"
    return ""


def _whole(path: Path) -> bytes:
    """The dump, once it has been written to its end; else nothing."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not 0 < size < MAX_BYTES:
                return b""
            raw = stream.read()
    except OSError:
        return b""
    return raw if raw.endswith(STOP) and path.stat().st_size == len(raw) else b""
