"""Where the test cluster cannot be had its tests are skipped by name, saying why; in CI they fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm import conftest
from tests.slurm import lab as labs
from tests.slurm.lab import Lab, LabError

ROOT = Path(__file__).parents[2]
NOT_HERE = "slurmctld not found, and only root with apt-get could install Slurm"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    """A cluster whose programs are not here and cannot be installed."""

    def refuse() -> None:
        raise LabError(NOT_HERE)

    monkeypatch.setattr(labs, "missing", lambda: ["slurmctld"])
    monkeypatch.setattr(labs, "install", refuse)
    return Lab(tmp_path)


def test_elsewhere_the_tests_are_skipped_and_say_why(nowhere: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(conftest.NEEDED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"no Slurm cluster here: {NOT_HERE}"):
        conftest.start(nowhere)


def test_in_ci_they_fail(nowhere: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(conftest.NEEDED, "1")
    with pytest.raises(LabError, match=NOT_HERE):
        conftest.start(nowhere)
    assert f"export {conftest.NEEDED}=1" in (ROOT / ".ci" / "run").read_text()


def test_every_test_that_is_skipped_is_named(tmp_path: Path) -> None:
    """As pytest is set up here: one line each, also where one fixture skips them all."""
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\n@pytest.fixture(scope='session')\ndef lab():\n"
        "    pytest.skip('no Slurm cluster here: why')\n\n"
        "def test_one(lab): ...\ndef test_other(lab): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(lines) == 2, done.stdout
    for name, line in zip(("test_one", "test_other"), lines, strict=True):
        assert f"::{name} - " in line
        assert line.endswith("no Slurm cluster here: why")
