"""`prefix-train stream build` and `check` as programs: killed, out of room, and given damaged stores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import models, stream_faults, streams

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(ROOT / "tests" / "stream_faults.py")]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "a model's folder"
    models.build("qwen3").save_pretrained(folder, max_shard_size="20KB")
    return folder


def faults(*arguments: str | Path, before: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What the program of faults printed, line by line."""
    done = subprocess.run(
        [*before, *PROGRAM, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefix_train.cli", "stream", *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A build that nothing killed: its files, and how many events it had."""
    folder = tmp_path_factory.mktemp("unbroken")
    (found,) = faults("kill", model, folder, str(stream_faults.NEVER))
    assert (found["killed"], found["again"]) == (0, 0)
    store = folder / str(stream_faults.NEVER)
    return {"events": found["events"], "files": streams.contents(store), "store": store}


@pytest.mark.slow
def test_a_build_that_is_killed_anywhere_goes_on_to_the_same_store(model, unbroken, tmp_path) -> None:
    """Before, in the middle of and after a file's writing and naming, up to the last file's removal."""
    events = unbroken["events"]
    points = sorted({0, 1, 2, *range(5, events, events // 9), *range(events - 6, events)})
    found = faults("kill", model, tmp_path, *map(str, points))
    assert [line["event"] for line in found] == points
    for line in found:
        assert (line["killed"], line["again"]) == (-9, 0), line
        assert streams.contents(tmp_path / str(line["event"])) == unbroken["files"], line["event"]
        assert line["kept"] == line["there"], "what had been finished was written again"
    assert len({len(line["there"]) for line in found}) >= 4, "killed early and late"
    assert any(line["there"] and len(line["there"]) < 5 for line in found)


def test_a_disk_that_fills_up_is_one_line_and_room_is_all_that_it_takes(model, unbroken, tmp_path) -> None:
    """A real disk of 1 MiB, mounted for the program alone."""
    mount = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    namespace = ("unshare", *(["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]))
    note = len(json.dumps(json.loads((unbroken["store"] / "manifest.json").read_text()))) + 1000
    files = [(unbroken["store"] / name).stat().st_size for name in ("embedding.bin", "block.0.bin")]
    room = sum(-(-size // 4096) * 4096 for size in (note, *files)) + 4096
    before = (*namespace, "sh", "-c", mount, str(tmp_path))
    found = faults("full", model, tmp_path, str(room), before=before)
    first, files = found
    errors = [line for line in first["printed"].splitlines() if line.startswith("error: ")]
    assert first["status"] == 2
    assert len(errors) == 1
    assert "Traceback" not in first["printed"]
    assert "the disk is full: block.1 has " in errors[0]
    assert "run the same command again" in errors[0]
    assert not any(name.startswith(".") or name == "manifest.json" for name in first["left"])
    assert [name for name in first["left"] if name.endswith(".bin")] == ["block.0.bin", "embedding.bin"]
    assert first["again"] == 0
    whole = {path.name: path.read_bytes().hex() for path in sorted(unbroken["store"].iterdir())}
    assert files["files"] == whole


def test_a_limit_on_the_size_of_files_is_one_line(model, tmp_path) -> None:
    limited = ["sh", "-c", 'ulimit -f 8 && exec "$@"', "limited", sys.executable, "-m", "prefix_train.cli", "stream"]
    done = subprocess.run(
        [*limited, "build", "--model", str(model), "--out", str(tmp_path / "s"), "--weights", "bf16"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "files may not be as large" in done.stderr.splitlines()[-1]


def test_check_reads_every_byte_and_ends_with_2_and_one_line_for_damage(unbroken, tmp_path) -> None:
    folder = tmp_path / "it's a store\nwith ünusual name"
    shutil.copytree(unbroken["store"], folder)
    good = command("check", folder, "--json")
    assert good.returncode == 0
    report = json.loads(good.stdout.splitlines()[-1])
    assert (report["blocks"], report["weights"], report["double_quant"]) == (2, "nf4", True)
    assert report["bytes"] == sum(path.stat().st_size for path in folder.glob("*.bin"))
    streams.change(folder / "block.1.bin", 70, flip=128)
    bad = command("check", folder)
    assert bad.returncode == 2
    assert bad.stdout == ""
    (line,) = bad.stderr.splitlines()
    assert line.startswith("error: block.1: ")
    assert all(word in line for word in ("block.1.bin, offset ", "expected sha256 ", "found "))


def test_build_makes_stores_of_what_a_configuration_builds(tmp_path) -> None:
    done = command("build", "--model", ROOT / "configs" / "digits.yaml", "--out", tmp_path / "s", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["blocks"], report["weights"], report["found"]) == (8, "nf4", 0)
