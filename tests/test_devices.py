"""Kinds of devices: what is a GPU, and which backend its collectives are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from zcompile import OptionError
from zcompile.runtime import device


@pytest.mark.parametrize(
    ("kind", "is_gpu", "backend"),
    [
        ("cpu", False, "gloo"),
        ("cuda", True, "nccl"),
        ("xpu", True, "xccl"),
        ("mps", False, "gloo"),
        ("mtia", True, "gloo"),
    ],
)
def test_a_gpu_is_what_has_streams(kind: str, is_gpu: bool, backend: str) -> None:
    assert device.is_gpu(torch.device(kind)) is is_gpu
    assert device.backend_of(kind) == backend


@pytest.mark.parametrize(("found", "kind"), [(None, "cuda"), ("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cuda")])
def test_the_kind_of_gpu_is_the_one_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch, found: str | None, kind: str
) -> None:
    there = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: there)
    assert device.gpu_kind() == kind


def test_a_device_without_graphs_is_never_within_a_capture() -> None:
    assert not device.is_capturing(torch.device("cpu"))


def test_cuda_graphs_are_of_cuda() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"cuda_graphs: needs a CUDA device, and the model is on cpu"):
        zcompile.compile(model, cuda_graphs=True)
    assert type(model.weight) is nn.Parameter, "the model is as it was"


def test_a_thread_that_asks_for_events_stays_on_its_gpu_and_out_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: chosen.append(mode._obj.value))
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(set_device=chosen.append))
    monkeypatch.setattr(device.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    device.only_asks(torch.device("cuda", 3))
    assert chosen == [torch.device("cuda", 3), 1]
