"""The figures that `make bench-cpu` has to reach, measured live: a busy machine slows both sides alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import compose
from prefix_train import bench, verify

CONFIG = compose.load(Path(__file__).parents[2] / "configs" / "digits.yaml")


@pytest.mark.slow
def test_a_pack_is_ten_times_faster_and_memory_grows_less_than_its_continuations() -> None:
    found = bench.cpu(CONFIG, prefix=2048, continuations=32, length=32, repeats=2)
    assert found["gate"]["passed"]
    assert found["ratio"] > 10
    assert found["update_bytes_growth"] < 2.5


def test_no_figure_without_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GATE", verify.Bounds(-1.0, -1.0, -1.0, -1.0))
    with pytest.raises(RuntimeError, match="no figure without the correctness gate"):
        bench.cpu(CONFIG, prefix=64, continuations=2, length=8, repeats=1)
