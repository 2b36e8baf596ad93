"""This node by itself: disks, memory, limits, caches, clock, and, from other modules, network and the run's files.

Run as a program, one JSON line per check: a dead file server holds whoever asks it, so that must not be the collector.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil

from preflight import cgroup, environment, mounts
from preflight.compare import MORE_MEMORY
from preflight.files import check_files
from preflight.network import check_name, check_network
from preflight.programs import Answer, one_by_one
from preflight.setting import Setting, proc, sys_folder
from preflight.states import Finding

GIB, MIB = 1 << 30, 1 << 20
LEAST_INODES = 1000
LEAST_SHM = {True: 1 * GIB, False: 32 * MIB}
"""Least free /dev/shm with GPUs and without: NCCL's ranks of one node talk through it; a container's default, 64 MiB,
ends them with a bus error."""
LEAST_RANK_GIB = 4.0
"""Least memory of a rank with a GPU: Python, torch and CUDA by themselves take two to three GiB of it. What the model
takes besides is preflight.min_free_memory_gib's."""
LEAST_FILES = 1024
"""Least open files: a rank holds sockets to its peers, shards of the model, and loaded images."""
LEAST_LOCKED = 1 * GIB
"""Least locked memory where there is InfiniBand, which registers what it sends."""
CACHES = (
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "TMPDIR",
)
"""Variables that name folders for compiled kernels; ranks that are told nothing use the folder for temporary files."""
MOST_SKEW_S = 2.0


def check_disk(setting: Setting) -> Finding:
    """Free space and inodes where the run writes."""
    least = setting.config.preflight.min_free_disk_gib
    return _room("host.disk", setting.folder, least, "free some space, or set run_root elsewhere")


def check_cache(setting: Setting) -> Finding:
    """Folders for compiled kernels: on this node's own disk, with room."""
    known = mounts.parse((proc() / "self/mountinfo").read_text())
    folders = {name: Path(os.environ[name]) for name in CACHES if os.environ.get(name)}
    folders.setdefault("TMPDIR", Path(tempfile.gettempdir()))
    for name, folder in folders.items():
        mount = mounts.of(folder, known)
        if mount is not None and mount.shared:
            return Finding("host.cache", "fail", f"{name} is {folder}, on the network file system {mount.point} "
                           f"({mount.kind} from {mount.source}): ranks would lose files to each other",
                           f"set {name} to a folder on the node's own disk")  # fmt: skip
    least = setting.config.preflight.min_free_disk_gib
    for name, folder in folders.items():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        room = _room("host.cache", there, least, f"free some, or set {name} elsewhere")
        if room.state != "pass":
            return room
        if setting.wants_gpus and os.statvfs(there).f_flag & os.ST_NOEXEC:
            return Finding("host.cache", "fail", f"{name}: {there} is mounted noexec: compiled kernels will not load",
                           f"set {name} elsewhere")  # fmt: skip
    listed = ", ".join(f"{name} {folder}" for name, folder in folders.items())
    return Finding("host.cache", "pass", listed)


def check_memory(setting: Setting) -> Finding:
    """Memory that the job can have: what is available on the machine, and no more than its control group may."""
    free, limit = psutil.virtual_memory().available, cgroup.memory_limit()
    limited = limit is not None and limit < free
    gib = (limit if limit is not None and limited else free) / GIB
    found = f"{gib:.1f} GiB of memory " + ("is the limit of the job's cgroup" if limited else "available")
    ranks = setting.config.slurm.tasks_per_node if setting.wants_gpus else 0
    wanted = {
        setting.config.preflight.min_free_memory_gib: "preflight.min_free_memory_gib",
        ranks * LEAST_RANK_GIB: f"{LEAST_RANK_GIB:g} for each of {ranks} rank(s)",
    }
    least, facts = max(wanted), {"gib": round(gib, 2)}
    if gib < least:
        return Finding("host.memory", "fail", f"{found}, {least:g} are wanted ({wanted[least]})", MORE_MEMORY, facts)
    return Finding("host.memory", "pass", found, "", facts)


def check_shm(setting: Setting) -> Finding:
    """Shared memory between the ranks of a node."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("host.shm", "fail", "there is no /dev/shm", "mount a tmpfs there")
    free, least = shutil.disk_usage(folder).free, LEAST_SHM[bool(setting.wants_gpus)]
    facts, found = {"free_mib": free // MIB}, f"{free // MIB:,} MiB free in /dev/shm"
    if free < least:
        return Finding("host.shm", "fail", f"{found}, {least // MIB:,} are wanted",
                       "remove what earlier jobs left there, or give the container --shm-size", facts)  # fmt: skip
    return Finding("host.shm", "pass", found, "", facts)


def check_limits(setting: Setting) -> Finding:
    """What the system lets a process have."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    soft = {name: resource.getrlimit(number)[0] for name, number in names.items()}
    facts = {name: "unlimited" if value == resource.RLIM_INFINITY else value for name, value in soft.items()}
    found = ", ".join(f"{name} {value}" for name, value in facts.items())
    short = [("nofile", LEAST_FILES)]
    if setting.wants_gpus and any((sys_folder() / "class" / "infiniband").glob("*")):
        short.append(("memlock", LEAST_LOCKED))
    for name, least in short:
        if soft[name] != resource.RLIM_INFINITY and soft[name] < least:
            return Finding("host.limits", "fail", f"{found}: {name} should be at least {least}",
                           f"raise {name} in limits.conf, or let Slurm propagate it (PropagateResourceLimits)",
                           facts)  # fmt: skip
    return Finding("host.limits", "pass", found, "", facts)


def check_clock(setting: Setting) -> Finding:
    """This node's clock against that of whoever keeps the run folder (without a run, the working folder): a file
    server's, or its own."""
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=setting.folder, prefix=".clock.") as file:
        file.write(b"x")
        file.flush()
        after = time.time()
        kept = os.stat(file.name).st_mtime
    # Coarse file times may lie a tick before the call that made them.
    skew = 0.0 if before - 0.1 <= kept <= after + 0.1 else (before + after) / 2 - kept
    whose = "the run folder's" if setting.run else f"that of the files in {setting.folder}"
    facts, found = {"skew_s": round(skew, 3)}, f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} {whose}"
    if abs(skew) > MOST_SKEW_S:
        return Finding("host.clock", "fail", f"the clock is {found}", "start time synchronisation (chronyd)", facts)
    return Finding("host.clock", "pass", f"the clock agrees with {whose}", "", facts)


def check_environment(setting: Setting) -> Finding:
    """Variables that change what a rank does; only those on the allow-list are looked at."""
    found = environment.shown(os.environ)
    own = {name: found.pop(name) for name in environment.OF_ONE_NODE if name in found}
    facts = {"variables": found, "own": own}
    return Finding("host.environment", "pass", f"{len(found) + len(own)} variables that matter are set", "", facts)


def _room(check: str, folder: Path, least_gib: float, advice: str) -> Finding:
    usage, inodes = shutil.disk_usage(folder), os.statvfs(folder)
    free = usage.free / GIB
    facts = {"free_gib": round(free, 2), "free_inodes": inodes.f_favail, "inodes": inodes.f_files}
    found = f"{free:.1f} GiB free at {folder}"
    if free < least_gib:
        return Finding(check, "fail", f"{found}, {least_gib} are wanted (preflight.min_free_disk_gib)", advice, facts)
    if inodes.f_files and inodes.f_favail < LEAST_INODES:
        return Finding(check, "fail", f"{found}, but only {inodes.f_favail} inodes", "remove files", facts)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight.") as file:
            file.write(b"x" * 4096)  # a quota counts what is written, not what the disk has
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding(check, "fail", f"{folder} cannot be written: {error.strerror}", advice, facts)
    return Finding(check, "pass", found, "", facts)


CHECKS: dict[str, Callable[[Setting], Finding]] = {
    "name": check_name,
    "network": check_network,
    "memory": check_memory,
    "shm": check_shm,
    "limits": check_limits,
    "environment": check_environment,
    "disk": check_disk,
    "clock": check_clock,
    "cache": check_cache,
    "files": check_files,
}
"""By the second half of their names; those that ask file servers last."""


def check_host(setting: Setting) -> list[Finding]:
    """All of CHECKS, in a program of its own that is started again behind a check that ended or hung it."""
    argv = [sys.executable, "-m", "preflight.host", setting.to_text()]
    # A check that hangs takes half of what is left, so that those behind it have a turn.
    asked = one_by_one(argv, list(CHECKS), lambda: setting.left_s / 2)
    return [
        _no_answer(f"host.{name}", found) if isinstance(found, Answer) else Finding(**found) for name, found in asked
    ]


def _no_answer(check: str, answer: Answer) -> Finding:
    if answer.status is None:
        return Finding(check, "silent", f"{check} did not end in time: does a file server not answer?")
    return Finding(check, "broken", answer.last_error_line, "see `python -m preflight.host`")


def main() -> None:
    """Run the checks that the command line names, behind the setting."""
    setting = Setting.from_text(sys.argv[1])
    for name in sys.argv[2:]:
        print(json.dumps(asdict(CHECKS[name](setting))), flush=True)


if __name__ == "__main__":
    from preflight import host  # the module by its name, as others that are imported here see it

    host.main()
