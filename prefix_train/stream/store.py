"""A store on disk, opened: its blocks as mapped bytes, and the tensors in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train.stream import manifest as manifests
from prefix_train.stream import nf4
from prefix_train.stream.manifest import HEADER, MAGIC, BlockFile, Manifest, Stored

SLICE = 1 << 24
"""Bytes that are read at once."""


class Store:
    """The store in a folder, whose manifest has been read and whose files have been looked at (see `open`)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, folder: Path, check: Literal["size", "hash"] = "size") -> Store:
        """The store in `folder`. UserError names block, file, offset, what was expected and what was found.

        check: `size` looks at each file's size and header, which takes no time; `hash` reads every byte.
        """
        store = cls(folder, manifests.read(folder))
        for block in store.blocks:
            store.check_file(block)
        if check == "hash":
            with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
                for _ in pool.map(store.check_bytes, store.blocks):
                    pass
        return store

    @property
    def blocks(self) -> tuple[BlockFile, ...]:
        """All files of the store, in the order of the forward pass."""
        return self.manifest.blocks

    @cached_property
    def by_name(self) -> Mapping[str, BlockFile]:
        """The files by name; `head` is the embedding's where the two are tied."""
        found = {block.name: block for block in self.blocks}
        return found | {"head": found["embedding"]} if self.manifest.tied else found

    @property
    def layers(self) -> tuple[BlockFile, ...]:
        """The decoder's blocks, `block.0` and on."""
        return tuple(block for block in self.blocks if block.name.startswith("block."))

    def path(self, block: BlockFile) -> Path:
        """The block's file."""
        return self.folder / block.file

    def bytes(self, block: BlockFile) -> Tensor:
        """uint8 [nbytes]: the whole file, mapped, aligned to 64 bytes. What is written to it never reaches the disk.

        A file that is cut off after this ends the process when the lost part is touched (SIGBUS); `read_into` says so.
        """
        self._check_size(block)
        return torch.from_file(str(self.path(block)), shared=False, size=block.nbytes, dtype=torch.uint8)

    def read_into(self, block: BlockFile, out: Tensor, offset: int = 0) -> None:
        """Fill `out`, uint8 and contiguous on the CPU, with the file's bytes from `offset` on.

        Raises UserError if the file ends before, or cannot be read.
        """
        view, done = out.numpy().data, 0
        try:
            with self.path(block).open("rb", buffering=0) as file:
                while done < len(view):
                    got = os.preadv(file.fileno(), [view[done:]], offset + done)
                    if not got:
                        cut = f"{offset + done:,}: cut off"
                        raise self._damage(block, offset + done, f"{block.nbytes:,} bytes", cut)
                    done += got
        except OSError as error:
            raise self._unreadable(block, offset + done, error) from error

    def check_file(self, block: BlockFile) -> None:
        """Raise UserError unless the block's file is there, as long as it should be, and this store's by its header."""
        self._check_size(block)
        try:
            with self.path(block).open("rb") as file:
                head = file.read(HEADER)
        except OSError as error:
            raise self._unreadable(block, 0, error) from error
        if head[: len(MAGIC)] != MAGIC:
            raise self._damage(block, 0, f"{MAGIC!r}", f"{head[: len(MAGIC)]!r}: not a store's file")
        found = head[len(MAGIC) : len(MAGIC) + 32].hex()
        if head != manifests.header(block.sha256):
            raise self._damage(block, len(MAGIC), f"sha256 {block.sha256}", f"{found}: another store's file")

    def check_bytes(self, block: BlockFile) -> None:
        """Raise UserError unless every byte of the file is what was written; names the first tensor that is not."""
        end = HEADER
        for stored, name, part in block.parts:
            self._check_padding(block, end, part.offset)
            end = part.offset + part.nbytes
            if (found := self._sha256(block, part.offset, part.nbytes)) != part.sha256:
                which = f"{stored.name} ({name}, {part.nbytes:,} bytes)"
                raise self._damage(block, part.offset, f"sha256 {part.sha256}", found, which)
        self._check_padding(block, end, block.nbytes)

    def tensors(self, block: BlockFile) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the block by the parameter's full name; plain ones are views of the mapped file."""
        mapped = self.bytes(block)
        for stored in block.tensors:
            yield f"{block.module}.{stored.name}", unpack(stored, mapped)

    def _check_padding(self, block: BlockFile, start: int, stop: int) -> None:
        padding = torch.empty(stop - start, dtype=torch.uint8)
        self.read_into(block, padding, start)
        if padding.any():
            first = int(padding.nonzero()[0])
            raise self._damage(block, start + first, "0 between the tensors", str(int(padding[first])))

    def _sha256(self, block: BlockFile, offset: int, nbytes: int) -> str:
        found = hashlib.sha256()
        buffer = torch.empty(min(SLICE, nbytes), dtype=torch.uint8)
        for start in range(0, nbytes, SLICE):
            piece = buffer[: nbytes - start]
            self.read_into(block, piece, offset + start)
            found.update(piece.numpy().data)
        return found.hexdigest()

    def _check_size(self, block: BlockFile) -> None:
        try:
            size = os.stat(self.path(block)).st_size
        except OSError as error:
            raise self._damage(block, 0, f"{block.nbytes:,} bytes", f"no file ({error.strerror})") from error
        if size != block.nbytes:
            where = min(size, block.nbytes)
            raise self._damage(block, where, f"{block.nbytes:,} bytes", f"{size:,}")

    def _unreadable(self, block: BlockFile, offset: int, error: OSError) -> UserError:
        return self._damage(block, offset, "readable bytes", str(error.strerror))

    def _damage(self, block: BlockFile, offset: int, expected: str, found: str, what: str = "") -> UserError:
        where = f"{block.name}: {self.path(block)}, offset {offset:,}{', ' if what else ''}{what}"
        return UserError(f"{where}: expected {expected}, found {found}; remove the store and build it again")


def parts_of(stored: Stored, buffer: Tensor) -> nf4.Parts:
    """Views of `buffer`, the bytes of the whole block (uint8, on any device, aligned to 64 bytes): `stored`'s parts."""
    return {
        name: buffer[part.offset : part.offset + part.nbytes].view(part.dtype).view(part.shape)
        for name, part in stored.parts.items()
    }


def unpack(stored: Stored, buffer: Tensor, out: Tensor | None = None, chunk: int = nf4.CHUNK) -> Tensor:
    """`stored` out of `buffer`, the bytes of its whole block (uint8, on any device, aligned to 64 bytes).

    A plain tensor is a view of `buffer`, or is copied to `out`. An NF4 one is dequantised to its dtype, `chunk`
    elements at a time, into `out` or a new tensor.
    """
    parts = parts_of(stored, buffer)
    if stored.weights == "plain":
        return parts["data"] if out is None else out.copy_(parts["data"])
    if out is None:
        out = torch.empty(stored.shape, dtype=stored.dtype, device=buffer.device)
    return nf4.dequantise(parts, out, chunk)
