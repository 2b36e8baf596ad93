"""Images of a data file: found below its folder or in its rows, decoded completely, processed once, reloadable.

P patches, D values per patch. What is kept of an image is its grid and a digest of its processed pixels; the pixels
themselves are cached up to a number of bytes and read again where they have left the cache.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import struct
import threading
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from numpy.typing import NDArray

from configs.errors import UserError
from configs.wording import shown

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded; Pillow knows more, and hands some of it to other programs."""

MAX_PIXELS = 89_478_485
"""Pillow's own bound, above which an image counts as a decompression bomb."""

MAX_FILE_BYTES = 1 << 30

DATA_URI = re.compile(r"data:image/[^,]*;base64,(.*)", re.DOTALL)

DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    NotImplementedError,
    struct.error,
    zlib.error,
    UserWarning,
)
"""What Pillow's decoders raise on broken files, and the warnings that count as such."""


@dataclass(frozen=True, slots=True)
class Inline:
    """An image that stands in its row as a data URI. Equal ones have equal bytes (`sha256`).

    place: the row and which of its images, for messages. uri: reads the row again and gives the data URI; raises
    UserError where the row is no longer what it was.
    """

    sha256: bytes
    place: str = field(compare=False)
    uri: Callable[[], str] = field(compare=False)

    @classmethod
    def of(cls, uri: str, place: str, again: Callable[[], str]) -> Inline:
        """The image of the data URI `uri`, which `again` finds anew. Raises UserError where it is none."""
        return cls(hashlib.sha256(_bytes_of(uri, place)).digest(), place, again)

    def read(self) -> bytes:
        """Its bytes."""
        return _bytes_of(self.uri(), self.place)

    def __str__(self) -> str:
        return self.place


def _bytes_of(uri: str, place: str) -> bytes:
    found = DATA_URI.fullmatch(uri)
    if found is None:
        raise UserError(f"{place} is no data URI of an image in base64; write data:image/png;base64,...")
    try:
        return base64.b64decode(found[1], validate=True)
    except ValueError as error:
        raise UserError(f"{place} is broken base64: {error}") from error


Origin = Path | Inline
"""Where an image is read from."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageRef:
    """An image in an example: tokens [start, start + length) are its placeholders.

    grid: (t, h, w) in patches. digest: SHA-256 of processed pixels and grid, hex.
    """

    start: int
    length: int
    grid: tuple[int, int, int]
    digest: str
    path: Origin
    store: ImageStore

    @property
    def pixels(self) -> NDArray[np.float32]:
        """[P, D] float32, read-only: the processed pixels, `load()`."""
        return self.load()

    def load(self) -> NDArray[np.float32]:
        """[P, D] float32, read-only. Raises UserError where the file is no longer what it was."""
        return self.store.load(self.path, self.digest)


class ImageStore:
    """Processes images through one image processor; safe to use from several threads."""

    def __init__(self, image_processor: Any, cache_bytes: int = 1 << 30) -> None:
        """image_processor: of transformers, giving `pixel_values` and `image_grid_thw`. cache_bytes: pixels kept."""
        self._processor = image_processor
        self._cache_bytes = cache_bytes
        self._known: dict[Origin, tuple[tuple[int, int, int], str]] = {}
        self._pixels: OrderedDict[Origin, NDArray[np.float32]] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def add(self, path: Origin, source: str) -> tuple[tuple[int, int, int], str]:
        """Grid and digest of the image file `path`, decoded completely the first time that it is named."""
        with self._lock:
            if path not in self._known:
                pixels, grid = self._process(path, source)
                self._known[path] = grid, _digest(pixels, grid)
                self._keep(path, pixels)
            return self._known[path]

    def load(self, path: Origin, digest: str) -> NDArray[np.float32]:
        """Pixels [P, D] of the image file `path`. Raises UserError unless they still have `digest`."""
        with self._lock:
            if path in self._pixels:
                self._pixels.move_to_end(path)
                return self._pixels[path]
            pixels, grid = self._process(path, str(path))
            if _digest(pixels, grid) != digest:
                raise UserError(f"{path}: the image has changed since the data was read; start again")
            self._keep(path, pixels)
            return pixels

    def _process(self, path: Origin, source: str) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        image = decode(path, source)
        try:
            out = self._processor(images=[image], return_tensors="np")
        except ValueError as error:
            raise UserError(f"{_where(path, source)} of size {image.size}: {error}") from error
        pixels = np.ascontiguousarray(out["pixel_values"], dtype=np.float32)
        pixels.flags.writeable = False
        t, h, w = (int(size) for size in out["image_grid_thw"][0])
        return pixels, (t, h, w)

    def _keep(self, path: Origin, pixels: NDArray[np.float32]) -> None:
        self._pixels[path] = pixels
        self._held += pixels.nbytes
        while self._held > self._cache_bytes and len(self._pixels) > 1:
            self._held -= self._pixels.popitem(last=False)[1].nbytes


def locate(folder: Path, name: str, source: str) -> Path:
    """The file that `name`, a path below `folder` or an absolute one into it, leads to, every link followed.

    Raises UserError where it is no regular file or lies outside `folder`.
    """
    path = Path(name)
    away = path.is_absolute() and not any(path.is_relative_to(one) for one in (folder.absolute(), folder.resolve()))
    if away or ".." in path.parts or "://" in name or name.startswith("data:"):
        raise UserError(f"{source}: image {shown(name)}: write a path below the data file's folder")
    try:
        path = (folder / name).resolve(strict=True)
    except FileNotFoundError:
        raise UserError(f"{source}: image {shown(name)}: no such file below {folder}") from None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a link leads to itself"
        raise UserError(f"{source}: image {shown(name)} cannot be reached: {reason}") from error
    if not path.is_relative_to(folder.resolve()):
        raise UserError(f"{source}: image {shown(name)} leads outside the data file's folder; copy it there")
    if not path.is_file():
        raise UserError(f"{source}: image {shown(name)} is no file")
    return path


def decode(path: Origin, source: str) -> PIL.Image.Image:
    """The image file `path` as RGB, upright, decoded to the last byte.

    Raises UserError where it is broken, of an unknown format, too large, animated, or would lose values as 8-bit RGB.
    """
    where = _where(path, source)
    content = path.read() if isinstance(path, Inline) else _content(path, where)
    try:
        with warnings.catch_warnings():
            for doubt in (UserWarning, PIL.Image.DecompressionBombWarning):
                warnings.simplefilter("error", doubt)
            # verify() reads every checksum, which load() does not, and leaves the image unusable.
            PIL.Image.open(io.BytesIO(content), formats=FORMATS).verify()
            image: PIL.Image.Image = PIL.Image.open(io.BytesIO(content), formats=FORMATS)
            _refuse_unfit(image, where)
            image.load()
            image = PIL.ImageOps.exif_transpose(image)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise UserError(f"{where} has more than {MAX_PIXELS:,} pixels; make it smaller") from error
    except DECODE_ERRORS as error:
        reason = "of no known format" if isinstance(error, PIL.UnidentifiedImageError) else f"broken: {error}"
        raise UserError(f"{where} is {reason}; write one of {', '.join(FORMATS)}") from error
    with warnings.catch_warnings():
        # Of a palette with transparency Pillow says here that RGBA keeps more.
        warnings.simplefilter("ignore", UserWarning)
        return image.convert("RGB")


def _where(path: Origin, source: str) -> str:
    """The image `path` of the row `source`, for messages."""
    return str(path) if isinstance(path, Inline) else f"{source}: image {str(path)!r}"


def _content(path: Path, where: str) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UserError(f"{where} is a file of {size:,} bytes, more than {MAX_FILE_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}") from error


def _refuse_unfit(image: PIL.Image.Image, where: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise UserError(f"{where} has {image.width * image.height:,} pixels, more than {MAX_PIXELS:,}; make it smaller")
    # A photograph's second picture (MPO) is a preview; the first is the photograph.
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise UserError(f"{where} has {getattr(image, 'n_frames', 1)} frames; write each frame as an image of its own")
    if image.mode.startswith(("I", "F")):
        raise UserError(f"{where} has the mode {image.mode}, more than 8 bits a channel; convert it to 8-bit RGB")


def _digest(pixels: NDArray[np.float32], grid: tuple[int, int, int]) -> str:
    digest = hashlib.sha256(repr((grid, pixels.shape)).encode())
    digest.update(pixels.data)
    return digest.hexdigest()
