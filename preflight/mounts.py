"""Which file system a folder lies on, from the text of /proc/self/mountinfo."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_NETWORK = """
    nfs nfs4 lustre beegfs gpfs ceph cifs smb2 smb3 smbfs afs 9p glusterfs orangefs pvfs2 panfs weka wekafs virtiofs
    fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs fuse.gcsfuse fuse.juicefs fuse.mfs fuse.beegfs fuse.wekafs
    fuse.rclone fuse.blobfuse fuse.blobfuse2
"""
NETWORK = frozenset(_NETWORK.split())
"""Types of file systems that several nodes share, as mountinfo writes them (proc(5), field 9)."""


class Mount(NamedTuple):
    """One line of mountinfo."""

    point: Path
    kind: str
    source: str

    @property
    def shared(self) -> bool:
        """Whether other nodes see the same files."""
        return self.kind in NETWORK


def parse(mountinfo: str) -> list[Mount]:
    """All mounts, in the order in which they were mounted. Lines of another form raise ValueError."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, source, *_ = after.split(" ")
        mounts.append(Mount(Path(_plain(before.split(" ")[4])), kind, _plain(source)))
    return mounts


def of(path: Path, mounts: list[Mount]) -> Mount | None:
    """The mount that `path`, or its nearest folder that exists, lies on: the deepest one, the last of equals."""
    real = Path(os.path.realpath(path))
    above = [mount for mount in mounts if real.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
