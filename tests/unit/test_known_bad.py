"""Combinations of versions that are known to be bad, and their neighbours that are not."""

from __future__ import annotations

import pytest

from preflight import known_bad
from preflight.setting import Setting
from preflight.states import Finding

HOPPER = {"capability": (9, 0), "nvcc": True, "fla_kernels": True}
BAD = [
    ("triton_hopper_gradients", {"versions": {"triton": "3.6.0", "fla": "0.6.0"}, **HOPPER}),
    ("triton_hopper_gradients", {"versions": {"triton": "3.4.0", "fla": "0.6.0"}, **HOPPER}),
    ("triton_hopper_gradients", {"versions": {"triton": "3.7.0", "tilelang": "0.1.15"}, **HOPPER, "nvcc": False}),
    ("tilelang_half_installed", {"errors": {"tilelang": "OSError: libz3.so: cannot open shared object file"}}),
    ("tilelang_half_installed", {"errors": {"fla": "ImportError: z3 library not found"}}),
    ("transformers_drops_boundaries", {"versions": {"transformers": "5.2.0"}}),
    ("transformers_drops_boundaries", {"versions": {"transformers": "5.8.1"}}),
    ("cuda13_old_driver", {"cuda": "13.0", "driver": "575.57.08"}),
    ("fla_without_pins", {"versions": {"fla": "0.5.0"}, "fla_kernels": True}),
]
GOOD = [
    {"versions": {"triton": "3.7.1", "fla": "0.6.0"}, **HOPPER},
    {"versions": {"triton": "3.3.1", "fla": "0.6.0"}, **HOPPER},
    {"versions": {"triton": "3.6.0", "fla": "0.6.0", "tilelang": "0.1.15"}, **HOPPER},
    {"versions": {"triton": "3.6.0", "fla": "0.6.0"}, **HOPPER, "capability": (8, 0)},
    {"versions": {"triton": "3.6.0"}, **HOPPER, "fla_kernels": False},
    {"versions": {"transformers": "5.24.0"}, "cuda": "13.0", "driver": "580.159.04"},
    {"versions": {"transformers": "5.9.0"}, "cuda": "12.8", "driver": "570.10"},
    {"errors": {"tilelang": "ImportError: numpy"}},
    {},
]


@pytest.mark.parametrize(("row", "facts"), BAD)
def test_known_bad_combinations(row: str, facts: dict[str, object]) -> None:
    found = known_bad.judge_known_bad(known_bad.Facts(**facts))  # type: ignore[arg-type]
    assert [(finding.check, finding.state) for finding in found] == [(f"known.{row}", "fail")]


@pytest.mark.parametrize("facts", GOOD)
def test_combinations_that_work(facts: dict[str, object]) -> None:
    (finding,) = known_bad.judge_known_bad(known_bad.Facts(**facts))  # type: ignore[arg-type]
    assert finding.state == "pass"


def test_every_row_has_a_test_a_source_and_a_date() -> None:
    assert {row.name for row in known_bad.ROWS} == {name for name, _ in BAD}
    for row in known_bad.ROWS:
        assert row.source
        assert len(row.date) == len("2026-11-30")


def test_rows_are_asked_with_what_the_checks_found() -> None:
    findings = [
        Finding("import.triton", "pass", "", "", {"package": "triton", "version": "3.6.0", "declared": "3.6.0"}),
        Finding("import.fla", "pass", "", "", {"package": "fla", "version": "0.6.0", "declared": "0.6.0"}),
        Finding("import.tilelang", "fail", "", "", {"package": "tilelang", "error": "OSError: libz3.so"}),
        Finding("torch.backends", "pass", "", "", {"capability": [9, 0], "cuda": "13.0"}),
        Finding("device.gpus", "pass", "", "", {"gpus": [{"driver_version": "570.1"}]}),
    ]
    found = known_bad.check_known_bad(Setting(), findings)
    assert [finding.check.partition(".")[2] for finding in found] == [
        "triton_hopper_gradients",
        "tilelang_half_installed",
        "cuda13_old_driver",
    ]
