"""Survey: a profile of the machine that the ranks run on, measured in a few seconds.

All ranks measure at the same time, so what they share, memory, processors and links, is shared as in a step. Figures
are the best of several runs: what the machine reaches when nothing else disturbs it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from zcompile.hardware import DTYPES, Hardware, Link
from zcompile.runtime.calibration import best_seconds
from zcompile.runtime.groups import Communicator

_PRODUCT = {"cpu": 1024, "cuda": 8192}
_TOUCHED = {"cpu": 64 * 2**20, "cuda": 2**30}
_SENT = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
"""Sides of matrices, bytes read and written, bytes gathered: enough for the full rate, little enough to end soon."""
_SHAPE = (4, 8, 512, 64)
"""Batch, heads, length and channels of the attention that is measured."""


@torch.no_grad()
def survey(communicator: Communicator, name: str) -> Hardware:
    """What this rank's device and its group reach. Collective: every rank must measure."""
    survey = _Survey(communicator)
    flops = {dtype: survey.product_rate(getattr(torch, dtype)) for dtype in DTYPES}
    links = survey.links()
    return Hardware(
        name=name,
        flops=flops,
        memory_bandwidth=survey.memory_bandwidth(),
        links=links,
        device=communicator.device.type,
        memory=_memory(communicator.device) / _ranks_here(communicator),
        attention=min(survey.attention_rate() / flops["float32"], 1.0),
        functions=survey.function_rate(),
        launch=survey.launch(),
        sending=survey.sending() if communicator.size > 1 else 0.0,
        host_bandwidth=survey.host_bandwidth(),
        source=f"measured by zcompile on {communicator.size} ranks at once, torch {torch.__version__}",
    )


class _Survey:
    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.device = communicator.device

    def _seconds(self, run: Callable[[], object], times: int = 5) -> float:
        """The best seconds of `run`; all ranks begin together."""
        self.communicator.any_rank(torch.zeros(1, dtype=torch.int32, device=self.device))
        return best_seconds(run, self.device, times)

    def product_rate(self, dtype: torch.dtype) -> float:
        side = _PRODUCT[self.device.type] // (1 if dtype is torch.float32 or self.device.type == "cuda" else 2)
        factor = torch.ones(side, side, dtype=dtype, device=self.device)
        return 2 * side**3 / self._seconds(lambda: factor @ factor)

    def memory_bandwidth(self) -> float:
        wide = torch.zeros(_TOUCHED[self.device.type] // 4, device=self.device)
        return 2 * wide.nbytes / self._seconds(lambda: wide.add_(1))

    def attention_rate(self) -> float:
        query = torch.ones(_SHAPE, device=self.device)
        batch, heads, length, channels = _SHAPE
        flops = 4 * batch * heads * length**2 * channels
        return flops / self._seconds(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query))

    def function_rate(self) -> float:
        """Elements per second that computing tanh takes beside reading and writing them."""
        wide = torch.ones(_TOUCHED[self.device.type] // 16, device=self.device)
        out = torch.empty_like(wide)
        beside = self._seconds(lambda: torch.tanh(wide, out=out)) - self._seconds(lambda: torch.neg(wide, out=out))
        return wide.numel() / beside if beside > 0 else math.inf

    def launch(self) -> float:
        small = torch.zeros(16, device=self.device)

        def several() -> None:
            for _ in range(1000):
                small.add_(1)

        return self._seconds(several) / 1000

    def host_bandwidth(self) -> float:
        if self.device.type != "cuda":
            return math.inf
        host = torch.zeros(_SENT["cuda"], dtype=torch.uint8, pin_memory=True)
        return host.nbytes / self._seconds(lambda: host.to(self.device))

    def links(self) -> tuple[Link, ...]:
        """One link between all ranks: which of them are neighbours is not known here."""
        if self.communicator.size == 1:
            return (Link("between ranks", 0.0, math.inf),)
        latency = self._seconds(lambda: self._gather(1), times=20)
        seconds = self._seconds(lambda: self._gather(self._share))
        sent = self._share * (self.communicator.size - 1)
        hops = math.ceil(math.log2(self.communicator.size))
        return (Link("between ranks", latency / hops, sent / max(seconds - latency, 1e-9)),)

    def sending(self) -> float:
        """Seconds of compute that a byte costs while it is sent beside it."""
        side = _PRODUCT[self.device.type]
        factor = torch.ones(side, side, device=self.device)
        flight = self._seconds(lambda: self._gather(self._share))
        products = math.ceil(3 * flight / self._seconds(lambda: factor @ factor))

        def compute() -> None:
            for _ in range(products):
                factor @ factor

        def beside() -> None:
            shard, full = self._tensors(self._share)
            started = self.communicator.all_gather(full, shard)
            compute()
            started.wait()

        lost = self._seconds(beside) - self._seconds(compute)
        return max(lost, 0.0) / (self._share * (self.communicator.size - 1))

    @property
    def _share(self) -> int:
        """Bytes of each rank's part of what is gathered."""
        return _SENT[self.device.type] // self.communicator.size

    def _tensors(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        shard = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return shard, shard.new_empty(nbytes * self.communicator.size)

    def _gather(self, nbytes: int) -> None:
        shard, full = self._tensors(nbytes)
        self.communicator.all_gather(full, shard).wait()


def _memory(device: torch.device) -> float:
    """Bytes of the device, or of the host for a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _ranks_here(communicator: Communicator) -> int:
    """Ranks that share the memory of this device."""
    return 1 if communicator.device.type == "cuda" else communicator.size
