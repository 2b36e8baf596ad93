"""docs/guides/support.md says what the code does: every family and every refusal in it is tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefix_train.families import FAMILIES, find_parts
from tests import models, support


@pytest.fixture(scope="module")
def page() -> str:
    return support.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_family_does_what_the_page_says(family: str, page: str, tmp_path: Path) -> None:
    (said,) = [cells for cells in support.supported(page) if cells[0] == support.TITLES[family]]
    found = support.row(family, tmp_path)
    assert found.cells()[:-1] == said[:-1]
    assert found.error < float(said[-1].removeprefix("< ")) <= 1e-10


def test_the_page_lists_all_families_and_no_other(page: str) -> None:
    assert [cells[0] for cells in support.supported(page)] == [support.TITLES[family] for family in models.FAMILIES]
    assert {id(find_parts(models.build(family)).family) for family in models.FAMILIES} == {
        id(family) for family in FAMILIES.values()
    }, "every family that is registered has a model here"


@pytest.mark.parametrize("name", support.REFUSED)
def test_a_refusal_is_the_one_on_the_page(name: str, page: str) -> None:
    assert support.refusal(name) == support.refused(page)[name]


def test_the_page_lists_all_refusals_and_no_other(page: str) -> None:
    assert list(support.refused(page)) == list(support.REFUSED)
