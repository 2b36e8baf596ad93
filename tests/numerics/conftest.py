"""Fixtures of the numerical tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefix_train import dropout
from tests import oracle


@pytest.fixture
def wide() -> Iterator[None]:
    """transformers' classes compute in float64."""
    with oracle.float64():
        yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are drawn for a few rows at a time, so that small tiles have several."""
    monkeypatch.setattr(dropout, "BLOCK", 4)
