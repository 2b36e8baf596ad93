"""Which passes over memory an attention layer makes between its projections, and which of them need not be.

A size is in tensors of all queries: at 144,000 positions of the 27B geometry one is 1.77 GB, 0.45 ms at 4 TB/s.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefix_train import heads
from tests import attention_passes
from tests.attention_passes import Pass, Pieces
from tests.live_bytes import LiveBytes

NEEDED = {"piece": "attention itself", "join": "its pieces' outputs become one", "piece_back": "attention itself",
          "add": "its pieces' gradients of queries become one"}  # fmt: skip

FUSED = {"rotate", "rotate_back", "gate", "gate_back"}
"""Before and behind attention."""

FOR_EACH_HEAD = {
    ("clone", "pieces._one_head_each"): "keys and values once for each query head, which cuDNN can do without",
    ("add_heads", "add_heads"): "their gradients, which come once for each query head, are summed",
}

AVOIDABLE = {
    ("clone", "modeling_qwen3_5.Qwen3_5Attention.forward"): "the gate is taken out of the projection's output",
    ("clone", "fused.Norm.__call__"): "queries are taken out of it",
    ("norm", "norm"): "can rotate as it writes",
    ("mul", "modeling_qwen3_5.apply_rotary_pos_emb"): "rotation",
    ("neg", "modeling_qwen3_5.rotate_half"): "rotation",
    ("cat", "modeling_qwen3_5.rotate_half"): "rotation",
    ("add", "modeling_qwen3_5.apply_rotary_pos_emb"): "rotation",
    ("cat", "modeling_qwen3_5.apply_rotary_pos_emb"): "what is rotated beside what is not",
    ("sigmoid", "modeling_qwen3_5.Qwen3_5Attention.forward"): "gate",
    ("mul", "modeling_qwen3_5.Qwen3_5Attention.forward"): "gate",
    ("mul", "MulBackward0"): "gate and rotation",
    ("sigmoid_backward", "SigmoidBackward0"): "gate",
    ("neg", "NegBackward0"): "rotation",
    ("slice_backward", "SliceBackward0"): "zeros and a part of a tensor: rotation's halves, and what is rotated",
    ("add", "SliceBackward0"): "the sum of such tensors",
    ("add", "MulBackward0"): "rotation",
    ("norm_back", "norm_back"): "can rotate back as it reads",
    ("clone", "LigerNormBackward"): "the gradient of queries, whose heads lie apart",
    ("cat", "SplitBackward0"): "the gradients of queries and gates become one tensor",
}

Found = Callable[..., list[Pass]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    def of(how: str, grouped: bool = False) -> list[Pass]:
        with monkeypatch.context() as patched:
            passes = attention_passes.of_attention(how, grouped, patched)
        print(f"\n{how}, {'grouped' if grouped else 'one head each'}\n{attention_passes.table(passes)}")
        return passes

    return of


def names(passes: list[Pass]) -> set[tuple[str, str]]:
    return {(one.name, one.where) for one in passes} - {(name, name) for name in NEEDED}


def sizes(passes: list[Pass]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for one in passes:
        if one.where not in NEEDED:
            total[one.phase] += one.size  # type: ignore[assignment]
    return {phase: round(size, 1) for phase, size in total.items()}


def test_every_pass_is_known(found: Found) -> None:
    """With transformers' own operations: 82 passes, of which 9 are attention's pieces and 6 join them."""
    passes = found("torch")
    assert names(passes) == AVOIDABLE.keys() | FOR_EACH_HEAD.keys()
    assert sizes(passes) == {"forward": 19.0, "recomputation": 19.0, "backward": 36.1}
    assert len(passes) == 82


def test_what_is_left_is_one_pass_before_and_one_behind(found: Found) -> None:
    passes = found("fused")
    assert names(passes) == FOR_EACH_HEAD.keys() | {(name, name) for name in FUSED}
    assert sizes(passes) == {"forward": 8.2, "recomputation": 8.2, "backward": 14.3}
    count = Counter((one.phase, one.name) for one in passes)
    for phase, more in (("forward", ""), ("recomputation", ""), ("backward", "_back")):
        assert count[phase, f"rotate{more}"] == 2  # queries, and keys
        assert count[phase, f"gate{more}"] == 1


def test_pieces_that_take_fewer_heads_of_keys(found: Found) -> None:
    passes = found("fused", grouped=True)
    assert names(passes) == {(name, name) for name in FUSED}
    assert sizes(passes) == {"forward": 5.3, "recomputation": 5.3, "backward": 8.5}


def test_no_more_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the worst moment, with all that a layer keeps for its backward."""
    peaks = {}
    for how in ("torch", "fused"):
        live = LiveBytes()
        with monkeypatch.context() as patched:
            attention_passes.of_attention(how, False, patched, live)
        peaks[how] = live.peak
    assert peaks["fused"] <= peaks["torch"]


def test_gradients_of_keys_and_values_go_before_the_next_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece's are as large as those of queries, where each query head has its own keys."""
    given: list[weakref.ref[torch.Tensor]] = []
    backward = Pieces.backward

    def watched(self: Pieces, *inputs: Any) -> Any:
        assert [one for one in given if one() is not None] == []
        found = backward(self, *inputs)
        given.extend(weakref.ref(one) for one in found[1:])
        return found

    monkeypatch.setattr(Pieces, "backward", watched)
    attention_passes.of_attention("fused", False, monkeypatch)
    assert len(given) == 6


def test_a_gradient_taken_by_index_would_show(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: attention's output is taken by index, whose gradient is zeros with something in them."""
    forward = heads.forward

    def by_index(module: Any, kind: Any, hidden: Any, tables: Any, attend: Any) -> torch.Tensor:
        return forward(module, kind, hidden, tables, lambda *inputs: attend(*inputs)[0][None])

    monkeypatch.setattr(heads, "forward", by_index)
    assert ("select_backward", "SelectBackward0") in names(found("fused"))
