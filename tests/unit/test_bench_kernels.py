"""What a profile says of the device's time."""

import torch

from prefix_train.bench_kernels import Span, idle, launched


def test_idle_is_what_no_kernel_covers() -> None:
    spans = [
        Span("b", 30.0, 40.0),  # in any order; 10 after the longest of what began before it
        Span("a", 0.0, 20.0),
        Span("other stream", 5.0, 12.0),
        Span("Memcpy HtoD (Pinned -> Device)", 21.0, 29.0),  # beside computing: covers nothing
        Span("b", 42.0, 50.0),  # a gap shorter than is named
    ]
    found = idle(spans)
    assert found["idle_s"] == 12e-6
    assert found["computing_s"] == 38e-6
    assert found["idle"] == [{"before": "b", "gaps": 1, "s": 10e-6}]


def test_nothing_computed() -> None:
    assert idle([Span("Memcpy DtoH", 0.0, 9.0)]) == {"computing_s": 0.0, "idle_s": 0.0, "idle": []}


def test_no_device_no_kernels() -> None:
    assert launched(lambda: None, torch.device("cpu")) == {"launched": []}
