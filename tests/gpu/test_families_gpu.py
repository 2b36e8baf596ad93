"""Every family's packs on CUDA against its examples alone in float64 on the CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import forests, models, oracle, support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def moved(value: Any, device: torch.device) -> Any:
    """A dataclass of tensors there."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: one.to(device) for name, one in found.items() if isinstance(one, Tensor)})


def pack_on(pack: forests.Pack, device: torch.device) -> forests.Pack:
    made: forests.Pack = moved(pack, device)
    made.layout = pack.layout.to(device)
    made.examples = [moved(example, device) for example in pack.examples]
    made.rows = [rows.to(device) for rows in pack.rows]
    return made


def on_cpu(result: oracle.Result) -> oracle.Result:
    return oracle.Result(
        result.loss.cpu().double(),
        [each.cpu().double() for each in result.hidden],
        [each.cpu().double() for each in result.losses],
        {name: each.cpu().double() for name, each in result.gradients.items()},
    )


def compare(family: str, device: torch.device) -> None:
    images = (0, 2) if family in models.WITH_VISION else ()
    wide = models.build(family, torch.float64)
    examples = forests.build(wide, *support.TREE, images=images).examples
    with oracle.float64():
        alone = oracle.run(wide, examples, models.IMAGE)
    model = models.build(family, torch.float32)
    pack = forests.build(model, *support.TREE, images=images)
    found = forests.run(model.to(device), pack_on(pack, device), deltanet="reference")
    forests.assert_same(on_cpu(found), alone, hidden=1e-4, gradient=1e-3)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_pack_is_its_examples(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    compare(family, torch.device("cuda"))
