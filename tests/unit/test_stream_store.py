"""A store that is opened: bytes as they were written, and one clear line for every damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.errors import UserError
from prefix_train.stream import build, manifest, nf4, places, whole
from prefix_train.stream.manifest import HEADER, BlockFile, Stored
from prefix_train.stream.sources import Source
from prefix_train.stream.store import Store, unpack
from tests import models, streams


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return streams.store(tmp_path_factory.mktemp("store") / "s", streams.NF4_TWICE)


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Store:
    """A copy that a test may damage."""
    shutil.copytree(made.folder, tmp_path / "s")
    return Store.open(tmp_path / "s")


def refused(folder: Path, *words: str, check: str = "size") -> None:
    """The store is refused in one line that has all of these words."""
    with pytest.raises(UserError) as found:
        Store.open(folder, check=check)
    line = str(found.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_a_plain_store_is_the_model_to_the_bit(tmp_path: Path) -> None:
    for family in models.FAMILIES:
        state = models.build(family, torch.bfloat16).state_dict()
        store = streams.store(tmp_path / family, streams.BF16, family)
        found = dict(pair for block in store.blocks for pair in store.tensors(block))
        assert found.keys() == state.keys() - ({"lm_head.weight"} if store.manifest.tied else set())
        for name, value in found.items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, state[name]), name


def test_only_matrices_of_blocks_are_in_four_bits(tmp_path: Path) -> None:
    """What bitsandbytes would convert: linear modules of the decoder, and neither head, embedding nor vision tower."""
    for family in models.FAMILIES:
        model = models.build(family)
        store = streams.store(tmp_path / family, streams.NF4, family)
        linear = {
            f"{name}.weight"
            for name, module in model.get_decoder().layers.named_modules(prefix="layers")
            if isinstance(module, nn.Linear)
        }
        found = {
            f"{block.module}.{stored.name}"
            for block in store.blocks
            for stored in block.tensors
            if stored.weights == "nf4"
        }
        assert {name[name.index("layers.") :] for name in found} == linear


def test_an_nf4_store_holds_what_nf4_makes_of_the_rounded_weights(made: Store) -> None:
    state = models.build("qwen3", torch.bfloat16).state_dict()
    for block in made.layers:
        mapped = made.bytes(block)
        for stored in block.tensors:
            weight = state[f"{block.module}.{stored.name}"]
            wanted = weight
            if stored.weights == "nf4":
                wanted = nf4.dequantise(nf4.quantise(weight, double=True), torch.empty_like(weight))
            assert torch.equal(unpack(stored, mapped), wanted)
            out = torch.empty(stored.shape, dtype=stored.dtype)
            assert unpack(stored, mapped, out, chunk=nf4.STEP) is out
            assert torch.equal(out, wanted)


def test_files_are_aligned_and_mapped_without_a_way_back_to_disk(store: Store) -> None:
    before = streams.contents(store.folder)
    for block in store.blocks:
        mapped = store.bytes(block)
        assert mapped.data_ptr() % manifest.ALIGNMENT == 0
        assert all(part.offset % manifest.ALIGNMENT == 0 for _, _, part in block.parts)
        mapped.fill_(7)
        read = torch.empty(block.nbytes, dtype=torch.uint8)
        store.read_into(block, read)
        assert read[0] != 7
    assert streams.contents(store.folder) == before


def test_blocks_come_in_the_order_of_the_forward_pass(tmp_path: Path) -> None:
    store = streams.store(tmp_path / "s", streams.BF16, "qwen3_5")
    names = ["embedding", "vision", "block.0", "block.1", "block.2", "block.3", "final_norm", "head"]
    assert [block.name for block in store.blocks] == names
    assert [block.name for block in store.layers] == names[2:6]


def every_pattern() -> Tensor:
    """uint8: all 65,536 patterns of 16 bits, those of NaN in bfloat16 and float16 among them."""
    return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).copy())


def store_of_patterns(folder: Path) -> tuple[Store, BlockFile, Stored, Stored]:
    """A store in which a packed tensor and a plain one hold every pattern of 16 bits."""
    model = models.build("qwen3", torch.bfloat16)
    model.model.layers[0].mlp.up_proj = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    model.model.layers[0].mlp.register_parameter("extra", nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16)))
    real = places.parts_of_weight(model.state_dict().__getitem__)

    def parts(block: BlockFile, stored: Stored) -> nf4.Parts:
        found = real(block, stored)
        if block.name == "block.0" and stored.name == "mlp.up_proj.weight":
            found["packed"] = every_pattern()
        if stored.name == "mlp.extra":
            found["data"] = every_pattern().view(torch.bfloat16)
        return found

    store = build.build(Source(model, parts, {"kind": "memory"}), folder, streams.NF4)
    block = store.by_name["block.0"]
    return store, block, block.by_name["mlp.up_proj.weight"], block.by_name["mlp.extra"]


def test_r60_every_pattern_of_16_bits_survives_every_hop(tmp_path: Path) -> None:
    store, block, packed, plain = store_of_patterns(tmp_path / "s")
    Store.open(store.folder, check="hash")
    mapped, read = store.bytes(block), torch.empty(block.nbytes, dtype=torch.uint8)
    store.read_into(block, read)
    slot = torch.empty_like(read).copy_(mapped)
    file = torch.from_numpy(np.fromfile(store.path(block), dtype=np.uint8))
    for hop in (mapped, read, slot, slot.clone(), file):
        assert hashlib.sha256(hop.numpy().data).digest() == hashlib.sha256(file.numpy().data).digest()
        for stored, name in ((packed, "packed"), (plain, "data")):
            part = stored.parts[name]
            assert torch.equal(hop[part.offset : part.offset + part.nbytes], every_pattern())
        assert torch.equal(unpack(plain, hop).view(torch.uint8), every_pattern())


def test_r60_fails_without_fix() -> None:
    """A hop that reads the bytes as numbers rewrites patterns of NaN."""
    assert not torch.equal(every_pattern().view(torch.float16).float().half().view(torch.uint8), every_pattern())


def trips(store: Store, hop) -> set[str]:
    """Hashes of the blocks after each of 100 trips from slot to slot, in which `hop` moves a block."""
    found = set()
    for block in store.layers[:1]:
        here = store.bytes(block).clone()
        for _ in range(100):
            here = hop(block, here)
            found.add(hashlib.sha256(here.numpy().data).hexdigest())
    return found


def test_r61_a_hundred_trips_leave_a_quantised_block_as_it_was(made: Store) -> None:
    block = made.layers[0]
    there = torch.empty(block.nbytes, dtype=torch.uint8)
    assert len(trips(made, lambda block, here: there.copy_(here).clone())) == 1
    moved = made.bytes(block).clone()
    for stored in block.tensors:
        assert torch.equal(unpack(stored, moved), unpack(stored, made.bytes(block)))


def test_r61_fails_without_fix(made: Store) -> None:
    """A move that dequantises and quantises again changes the bytes."""

    def again(block: BlockFile, here: Tensor) -> Tensor:
        moved = here.clone()
        for stored in block.tensors:
            if stored.weights == "nf4":
                for name, value in nf4.quantise(unpack(stored, here), double=True).items():
                    part = stored.parts[name]
                    moved[part.offset : part.offset + part.nbytes] = value.view(-1).view(torch.uint8)
        return moved

    assert len(trips(made, again)) > 1


def test_r65_a_block_in_four_bits_is_a_fraction_of_it_in_sixteen(tmp_path: Path) -> None:
    """Of what is streamed, the blocks: matrices take 0.5625 bytes for 2, with double quantisation 0.516."""
    wide = models.build("qwen3", torch.bfloat16)
    for layer in wide.model.layers:
        layer.mlp.up_proj = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    sizes = [
        build.from_model(wide, tmp_path / name, choice).layers[0].nbytes
        for name, choice in (("plain", streams.BF16), ("nf4", streams.NF4), ("double", streams.NF4_TWICE))
    ]
    assert sizes[1] < 0.29 * sizes[0]
    assert sizes[2] < 0.27 * sizes[0]


def test_r66_a_file_cut_off_while_the_store_is_open(store: Store) -> None:
    block = store.by_name["block.1"]
    streams.cut(store.path(block), 1000)
    words = ("block.1: ", str(store.path(block)), "offset 1,000", f"{block.nbytes:,}", "1,000")
    for use in (lambda: store.bytes(block), lambda: store.read_into(block, torch.empty(4096, dtype=torch.uint8))):
        with pytest.raises(UserError) as found:
            use()
        assert all(word in str(found.value) for word in words), str(found.value)


def test_r66_fails_without_fix(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping what is too short is an error of torch's that knows neither block nor offset."""
    monkeypatch.setattr(Store, "_check_size", lambda self, block: None)
    block = store.by_name["block.1"]
    streams.cut(store.path(block), 1000)
    with pytest.raises(RuntimeError) as found:
        store.bytes(block)
    assert "offset" not in str(found.value)
    assert "block.1:" not in str(found.value)


def test_reads_that_return_less_than_asked_for_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:1000]], offset))
    block = store.by_name["head"]
    out = torch.empty(block.nbytes - 77, dtype=torch.uint8)
    store.read_into(block, out, offset=77)
    assert torch.equal(out, store.bytes(block)[77:])


def test_a_missing_file_is_named(store: Store) -> None:
    store.path(store.by_name["block.1"]).unlink()
    refused(store.folder, "block.1: ", "block.1.bin, offset 0", "No such file")


def test_what_the_disk_or_its_rights_refuse_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    block = store.by_name["block.1"]
    part = next(part for _, _, part in block.parts)
    opened, preadv = Path.open, os.preadv

    def closed(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == store.path(block):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **more)

    def broken(file: int, views: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}") == str(store.path(block)) and offset >= part.offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(file, views, offset)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", closed)
        words = ("block.1: ", "block.1.bin, offset 0: expected readable bytes, found Permission denied; ")
        refused(store.folder, *words)
        with pytest.raises(UserError, match="Permission denied"):
            store.read_into(block, torch.empty(64, dtype=torch.uint8))
    monkeypatch.setattr(os, "preadv", broken)
    words = ("block.1: ", f"block.1.bin, offset {part.offset:,}: expected readable bytes, found Input/output error; ")
    refused(store.folder, *words, check="hash")
    check = whole.Check(store)
    with pytest.raises(UserError, match="expected readable bytes, found Input/output error"):
        check.wait()
    check.close()


@pytest.mark.parametrize("change", [-1, 1, -5000])
def test_a_file_of_another_length_is_named_with_both_lengths(store: Store, change: int) -> None:
    block = store.by_name["block.0"]
    streams.cut(store.path(block), block.nbytes + change)
    found = block.nbytes + change
    refused(store.folder, "block.0: ", f"offset {min(found, block.nbytes):,}", f"{block.nbytes:,} bytes", f"{found:,}")


def test_a_flipped_bit_is_found_by_reading_and_names_the_tensor(store: Store) -> None:
    block = store.by_name["block.1"]
    for stored, name, part in block.parts:
        streams.change(store.path(block), part.offset + part.nbytes // 2)
        Store.open(store.folder)
        words = ("block.1: ", f"offset {part.offset:,}", f"{stored.name} ({name}", part.sha256)
        refused(store.folder, *words, check="hash")
        streams.change(store.path(block), part.offset + part.nbytes // 2)
    Store.open(store.folder, check="hash")


def test_bytes_between_tensors_are_looked_at(store: Store) -> None:
    block = store.by_name["block.1"]
    part = next(part for _, name, part in block.parts if name == "offset")
    streams.change(store.path(block), part.offset + 9, flip=4)
    refused(store.folder, "block.1: ", f"offset {part.offset + 9:,}", "expected 0", "found 4", check="hash")


def test_another_store_s_file_is_known_at_sight(store: Store, tmp_path: Path) -> None:
    other = streams.store(tmp_path / "other", streams.NF4_TWICE, seed=1)
    shutil.copy(other.path(other.by_name["block.0"]), store.folder)
    expected, found = (s.by_name["block.0"].sha256 for s in (store, other))
    refused(store.folder, "block.0: ", "offset 16", expected, found, "another store's file")


def test_a_file_that_is_no_store_s_is_known_at_sight(store: Store) -> None:
    block = store.by_name["head"]
    store.path(block).write_bytes(b"\x93NUMPY".ljust(block.nbytes, b"x"))
    refused(store.folder, "head: ", "offset 0", "NUMPY", "not a store's file")


def test_files_swapped_within_a_store_are_known_at_sight(store: Store) -> None:
    first, second = (store.path(block) for block in store.layers)
    first.rename(store.folder / "kept")
    second.rename(first)
    (store.folder / "kept").rename(second)
    refused(store.folder, "block.0: ", "another store's file")


def text(store: Store) -> str:
    return (store.folder / manifest.NAME).read_text(encoding="utf-8")


def test_a_manifest_that_was_changed_or_cut_is_refused(store: Store) -> None:
    whole = text(store)
    path = store.folder / manifest.NAME
    path.write_text(whole.replace('"double_quant": true', '"double_quant": false'), encoding="utf-8")
    refused(store.folder, manifest.NAME, "was changed", store.manifest.sha256)
    for damaged in (whole[: len(whole) // 2], "", "[]", "{}", '"x"', "\udcff"):
        path.write_bytes(damaged.encode("utf-8", "surrogateescape"))
        refused(store.folder, manifest.NAME, "cannot be read")


def test_a_manifest_of_another_format_is_refused(store: Store) -> None:
    later = manifest.encode(replace(store.manifest, format=2))
    (store.folder / manifest.NAME).write_bytes(later)
    refused(store.folder, "format 2", "1 is expected")


def rewritten(store: Store, **changes: object) -> None:
    """Write a manifest with a true hash in which the first part of block.0 is changed."""
    block = store.blocks[1]
    stored = block.tensors[0]
    name, part = next(iter(stored.parts.items()))
    changed = replace(stored, parts=stored.parts | {name: replace(part, **changes)})
    blocks = (store.blocks[0], replace(block, tensors=(changed, *block.tensors[1:])), *store.blocks[2:])
    (store.folder / manifest.NAME).write_bytes(manifest.encode(replace(store.manifest, blocks=blocks)))


@pytest.mark.parametrize(
    "changes", [{"offset": 0}, {"offset": 65}, {"offset": 1 << 40}, {"nbytes": 3}, {"shape": (9,)}]
)
def test_places_that_cannot_be_are_refused(store: Store, changes: dict[str, object]) -> None:
    rewritten(store, **changes)
    refused(store.folder, "block.0", "has no place")


def test_a_name_that_leaves_the_folder_is_refused(store: Store) -> None:
    blocks = (replace(store.blocks[0], name="../other"), *store.blocks[1:])
    (store.folder / manifest.NAME).write_bytes(manifest.encode(replace(store.manifest, blocks=blocks)))
    refused(store.folder, "../other", "no block's name")


def test_what_is_no_store_says_how_to_make_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        refused(folder, "is no store", "prefix-train stream build")


def test_the_manifest_says_what_the_store_is(made: Store) -> None:
    found = json.loads(text(made))
    assert found["config"]["model_type"] == "qwen3"
    assert (found["format"], found["weights"], found["double_quant"], found["dtype"]) == (1, "nf4", True, "bfloat16")
    first = found["blocks"][1]["tensors"][0]["parts"]["packed"]
    assert first["offset"] == HEADER
    assert first["dtype"] == "uint8"
