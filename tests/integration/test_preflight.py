"""`python -m preflight run` on this machine, with faults planted on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs import compose, runfolder
from configs.schema import Config, PreflightConfig
from preflight import names, packages
from preflight.programs import ask
from preflight.setting import Setting

ROOT = Path(__file__).parents[2]


def preflight(*arguments: str, path: Path | None = None) -> tuple[int, str, dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(path or ""), str(ROOT)]))}
    ran = subprocess.run(
        [sys.executable, "-m", "preflight", *arguments], env=env, capture_output=True, text=True, timeout=240
    )
    assert ran.stdout, ran.stderr
    return ran.returncode, ran.stdout, json.loads(ran.stdout.splitlines()[-1])


def plant(folder: Path, package: str, source: str) -> Path:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(source)
    return folder


def test_this_machine_passes() -> None:
    status, printed, document = preflight("run", "--json")
    assert status == 0, printed
    assert printed.startswith("PASS")
    checks = {finding["check"] for finding in document["nodes"][0]["findings"]}
    assert {"import.torch", "torch.backends", "libraries.mapped", "host.name", "host.cache", "known.bad"} <= checks
    names.check_allowed(sorted(checks))


def test_in_a_run_that_has_had_a_second_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's shell belongs to no life of the run; a step of an earlier life is still refused."""
    config = compose.load(ROOT / "configs" / "digits.yaml", ["preflight.min_free_memory_gib=0.5"])
    runfolder.write_text(tmp_path / runfolder.CONFIG, compose.to_yaml(config))
    runfolder.write_text(tmp_path / runfolder.ATTEMPT, "1")
    monkeypatch.delenv("PREFIX_TRAIN_ATTEMPT", raising=False)
    assert runfolder.of_life(tmp_path) is None
    preflight("run", str(tmp_path), "--json")
    preflight("judge", str(tmp_path), "--json")
    report = (tmp_path / "preflight" / "1" / "report.txt").read_text()
    assert "StaleAttempt" not in report
    monkeypatch.setenv("PREFIX_TRAIN_ATTEMPT", "0")
    with pytest.raises(AssertionError, match="attempt 0 may not write"):
        preflight("judge", str(tmp_path), "--json")


def test_planted_modules_are_found_and_blamed_one_by_one(tmp_path: Path) -> None:
    path = plant(tmp_path, "omegaconf", "__version__ = '9.9'")
    plant(path, "tilelang", "raise OSError('libz3.so: cannot open shared object file')")
    plant(path, "causal_conv1d", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    status, printed, document = preflight("run", "--json", path=path)
    assert status == 1
    assert printed.startswith("FAIL")
    by_check = {problem["finding"]["check"]: problem["finding"]["found"] for problem in document["problems"]}
    known = by_check.pop("known.tilelang_half_installed")
    assert "z3" in known
    assert by_check.keys() == {"import.omegaconf", "import.tilelang", "import.causal_conv1d"}
    assert str(path / "omegaconf") in by_check["import.omegaconf"]
    assert "libz3" in by_check["import.tilelang"]
    assert "signal 11" in by_check["import.causal_conv1d"]


def test_an_import_that_hangs_is_silent_and_costs_its_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plant(tmp_path, "hanging_module", "import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), str(ROOT)]))
    monkeypatch.setattr("preflight.imports.REQUIRED", ("numpy",))
    monkeypatch.setattr("preflight.imports.OPTIONAL", ())
    options = PreflightConfig(packages=["hanging_module"], deadline_s=4)
    began = time.monotonic()
    findings = packages.check_packages(Setting(Config(preflight=options), None, began + options.deadline_s))
    assert time.monotonic() - began < 60
    assert [(finding.check, finding.state) for finding in findings] == [
        ("import.numpy", "pass"),
        ("import.hanging_module", "silent"),
    ]


def test_a_deadline_ends_grandchildren_too(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.1)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    answer = ask([sys.executable, "-c", program], 2.0)
    assert answer.status is None
    assert alive.exists()
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()
