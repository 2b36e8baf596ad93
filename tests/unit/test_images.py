"""Images: found below the data's folder, decoded completely or refused, processed once, reloaded alike."""

from __future__ import annotations

import base64
import io
import os
import random
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from configs.errors import UserError
from prefix_train import images
from prefix_train.images import ImageStore, decode, locate
from tests import chats


def store(cache_bytes: int = 1 << 20) -> ImageStore:
    return ImageStore(chats.processor().image_processor, cache_bytes)


def test_an_image_is_decoded_once_and_loaded_again_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Path] = []
    stock = images.decode
    monkeypatch.setattr(images, "decode", lambda path, source: decoded.append(path) or stock(path, source))
    paths = [chats.draw(tmp_path / f"{index}.png", seed=index) for index in range(3)]
    held = store(cache_bytes=2 * 16 * 384 * 4)
    known = [held.add(path, "d.jsonl:1") for path in paths]
    assert held.add(paths[0], "d.jsonl:2") == known[0]
    assert decoded == paths
    assert known[0][0] == (1, 4, 4)
    first = [held.load(path, digest) for path, (_, digest) in zip(paths[1:], known[1:], strict=True)]
    assert decoded == paths
    again = held.load(paths[0], known[0][1])
    assert decoded == [*paths, paths[0]]
    assert again.shape == (16, 384)
    assert again.dtype == np.float32
    assert not np.array_equal(again, first[0])
    assert np.array_equal(again, store().load(paths[0], known[0][1]))


def test_the_cache_is_bounded_by_bytes(tmp_path: Path) -> None:
    held = store(cache_bytes=3 * 16 * 384 * 4)
    for index in range(10):
        path = chats.draw(tmp_path / f"{index}.png", seed=index)
        held.load(path, held.add(path, "d.jsonl:1")[1])
    assert held._held == sum(pixels.nbytes for pixels in held._pixels.values()) <= 3 * 16 * 384 * 4


def test_an_image_that_changes_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    path = chats.draw(tmp_path / "a.png")
    held = store(cache_bytes=0)
    _, digest = held.add(path, "d.jsonl:1")
    held.add(chats.draw(tmp_path / "b.png"), "d.jsonl:1")
    chats.draw(path, seed=1)
    with pytest.raises(UserError, match=r"a\.png: the image has changed since the data was read"):
        held.load(path, digest)


@pytest.mark.parametrize(
    "name",
    ["../a.png", "sub/../../a.png", "/etc/hostname", "https://example.com/a.png", "file:///etc/hostname", "data:,x"],
)
def test_paths_that_are_not_below_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    chats.draw(tmp_path / "a.png")
    (tmp_path / "inner" / "sub").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^d.jsonl:1: image .*: write a path below the data file's folder"):
        locate(tmp_path / "inner", name, "d.jsonl:1")


def test_links_may_stay_within_the_folder_and_not_leave_it(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    chats.draw(tmp_path / "outside" / "a.png")
    chats.draw(inner / "real.png")
    (inner / "link.png").symlink_to("real.png")
    (inner / "away.png").symlink_to(tmp_path / "outside" / "a.png")
    (inner / "folder").symlink_to(tmp_path / "outside")
    (inner / "circle.png").symlink_to("circle.png")
    (tmp_path / "alias").symlink_to(inner)
    assert locate(inner, "link.png", "d.jsonl:1") == (inner / "real.png").resolve()
    assert locate(tmp_path / "alias", "./link.png", "d.jsonl:1") == (inner / "real.png").resolve()
    for whole in (inner / "link.png", tmp_path / "alias" / "real.png"):
        assert locate(tmp_path / "alias", str(whole), "d.jsonl:1") == (inner / "real.png").resolve()
    for name in ("away.png", "folder/a.png", str(inner / "away.png")):
        with pytest.raises(UserError, match=r"leads outside the data file's folder"):
            locate(inner, name, "d.jsonl:1")
    with pytest.raises(UserError, match=r"'circle.png' cannot be reached"):
        locate(inner, "circle.png", "d.jsonl:1")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "folder.png", "."):
        with pytest.raises(UserError, match="is no file"):
            locate(tmp_path, name, "d.jsonl:1")
    for name in ("none.png", "folder.png/a.png", ""):
        with pytest.raises(UserError, match=r"^d.jsonl:1: image "):
            locate(tmp_path, name, "d.jsonl:1")
    with pytest.raises(UserError, match="cannot be reached"):
        locate(tmp_path, "a" * 5000, "d.jsonl:1")


def encoded(kind: str, image: PIL.Image.Image | None = None, **options: object) -> bytes:
    buffer = io.BytesIO()
    made = image or PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8))
    made.save(buffer, kind, **options)
    return buffer.getvalue()


def outcome(path: Path, content: bytes) -> str:
    """`image`, or the error's line; anything else that is raised fails the test."""
    path.write_bytes(content)
    try:
        mode = decode(path, "d.jsonl:1").mode
    except UserError as error:
        line = str(error)
    else:
        assert mode == "RGB"
        return "image"
    assert line.startswith("d.jsonl:1: image ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize("kind", images.FORMATS)
def test_truncated_files_are_broken(tmp_path: Path, kind: str) -> None:
    content = encoded(kind)
    assert outcome(tmp_path / "a", content) == "image"
    for length in (0, 1, 8, len(content) // 2, len(content) - 20):
        assert "broken" in (line := outcome(tmp_path / "a", content[:length])) or "of no known format" in line


@pytest.mark.parametrize("kind", images.FORMATS)
def test_damaged_files_are_an_error_or_an_image_and_never_a_traceback(tmp_path: Path, kind: str) -> None:
    draw, content = random.Random(3), encoded(kind)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 3, 20])):
            damaged[draw.randrange(min(len(damaged), draw.choice([64, 4096])))] = draw.randrange(256)
        outcome(tmp_path / "a", bytes(damaged))


def test_one_wrong_byte_in_a_png_s_pixels_is_found(tmp_path: Path) -> None:
    content = bytearray(encoded("PNG"))
    for at in range(60, len(content) - 20, 97):
        content[at] ^= 1
        assert outcome(tmp_path / "a", bytes(content)) != "image"
        content[at] ^= 1


def test_decompression_bombs_are_refused_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = encoded("PNG", PIL.Image.new("1", (20000, 9000)))
    assert len(bomb) < 100_000
    assert "has more than 89,478,485 pixels; make it smaller" in outcome(tmp_path / "a", bomb)
    much = encoded("PNG", PIL.Image.new("1", (12000, 9000)))
    assert "has more than 89,478,485 pixels; make it smaller" in outcome(tmp_path / "a", much)
    monkeypatch.setattr(images, "MAX_PIXELS", 40 * 56 - 1)
    assert "has 2,240 pixels, more than 2,239" in outcome(tmp_path / "a", encoded("PNG"))
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 100)
    assert "bytes, more than 100" in outcome(tmp_path / "a", encoded("PNG"))


def test_what_would_lose_values_is_refused(tmp_path: Path) -> None:
    frames = [PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    assert "has 2 frames" in outcome(tmp_path / "a", encoded("GIF", frames[0], save_all=True, append_images=frames[1:]))
    deep = PIL.Image.fromarray(np.full((8, 8), 40000, np.uint16))
    assert "mode I;16, more than 8 bits a channel" in outcome(tmp_path / "a", encoded("PNG", deep))
    assert "of no known format" in outcome(tmp_path / "a", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    assert "of no known format" in outcome(tmp_path / "a", b"<svg/>")


def test_every_way_to_write_colours_becomes_rgb(tmp_path: Path) -> None:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        assert outcome(tmp_path / "a", encoded("PNG", PIL.Image.new(mode, (20, 20)))) == "image"
    palette = PIL.Image.new("P", (20, 20))
    assert outcome(tmp_path / "a", encoded("PNG", palette, transparency=bytes(range(256)))) == "image"
    assert outcome(tmp_path / "a", encoded("JPEG", PIL.Image.new("CMYK", (20, 20)))) == "image"
    for size in ((1, 1), (3, 50), (50, 3), (1, 60)):
        path = tmp_path / "small.png"
        path.write_bytes(encoded("PNG", PIL.Image.new("RGB", size)))
        assert store().add(path, "d.jsonl:1")[0][0] == 1


def test_an_image_that_the_processor_refuses_is_the_row_s_error(tmp_path: Path) -> None:
    path = tmp_path / "long.png"
    path.write_bytes(encoded("PNG", PIL.Image.new("RGB", (900, 2))))
    with pytest.raises(UserError, match=r"^d.jsonl:1: image .*long.png' of size \(900, 2\): absolute aspect ratio"):
        store().add(path, "d.jsonl:1")
    uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    inline = images.Inline.of(uri, "d.jsonl:1: image 1 of the row", lambda: uri)
    with pytest.raises(UserError, match=r"^d.jsonl:1: image 1 of the row of size \(900, 2\): absolute aspect ratio"):
        store().add(inline, "d.jsonl:1")
