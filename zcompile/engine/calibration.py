"""Calibration: measures the rates of this rank's device and its group.

All ranks measure at the same time, so memory, processors and links are shared as in a step. Results are the best of
several runs: what the machine reaches undisturbed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zcompile.cost.hardware import Hardware, Link
from zcompile.cost.profile_files import DTYPES
from zcompile.runtime.device import is_gpu, synchronize, total_bytes
from zcompile.runtime.groups import AxisCommunicator, Communicator
from zcompile.torch_internals.dispatch import outside_modes


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements on a device."""

    side: int
    """Rows and columns of the matrices that are multiplied."""
    touched: int
    """Bytes read and written to measure memory: more than the caches hold."""
    sent: int
    """Bytes gathered to measure the link."""


LITTLE = Sizes(768, 32 * 2**20, 4 * 2**20), Sizes(4096, 256 * 2**20, 64 * 2**20)
"""For a fraction of a second, while a model is compiled: on the host, and on a GPU."""
MUCH = Sizes(1024, 64 * 2**20, 8 * 2**20), Sizes(8192, 2**30, 256 * 2**20)
"""For some seconds, for a profile: on the host, and on a GPU."""
_ATTENTION = (4, 8, 512, 64)
"""[batch, heads, length, channels] of the attention that is measured."""


def measure(
    communicator: Communicator, dtype: torch.dtype = torch.float32, tensor: Communicator | None = None
) -> Hardware:
    """The rates of the device, which computes in `dtype`, and of the group. Collective: every rank must measure.

    `tensor`: the ranks that have other parts of the model, neighbours of this one; their link comes first then. Runs
    outside of dispatch modes, such as those of a tracer.
    """
    with outside_modes(), torch.no_grad():
        meter = _Meter(communicator, LITTLE)
        near = [] if tensor is None else [_Meter(tensor, LITTLE)]
        links = [(one.link(axis), axis.size) for one in (*near, meter) for axis in one.communicator.axes]
        return Hardware(
            name="measured",
            flops=dict.fromkeys(DTYPES, meter.product_rate(dtype)),
            memory_bandwidth=meter.memory_bandwidth(),
            links=tuple(_joined(links)),
            device=communicator.device.type,
            host_bandwidth=meter.host_bandwidth(),
            source=f"measured when the model was compiled, on all ranks at once ({communicator.size})",
        )


def _joined(links: Sequence[tuple[Link, int]]) -> Iterator[Link]:
    """The levels of a network, given the link along each axis with the axis's size, neighbours first.

    As many groups measured at once as the earlier levels join, so together they send that many times more.
    """
    ranks = 1
    for index, (link, size) in enumerate(links):
        is_last = index == len(links) - 1
        if is_last or size > 1:
            yield replace(link, bandwidth=link.bandwidth * ranks, members=0 if is_last else size)
        ranks *= size


@torch.no_grad()
def survey(communicator: Communicator, name: str) -> Hardware:
    """A profile of this rank's device and its group. Collective: every rank must measure."""
    meter = _Meter(communicator, MUCH)
    flops = {dtype: meter.product_rate(getattr(torch, dtype)) for dtype in DTYPES}
    return Hardware(
        name=name,
        flops=flops,
        memory_bandwidth=meter.memory_bandwidth(),
        links=(meter.link(meter.communicator),),
        device=communicator.device.type,
        memory=total_bytes(communicator.device, communicator.size),
        attention=min(meter.attention_rate() / flops["float32"], 1.0),
        functions=meter.function_rate(),
        launch=meter.launch(),
        sending=meter.sending(),
        host_bandwidth=meter.host_bandwidth(),
        source=f"measured by zcompile on {communicator.size} ranks at once, torch {torch.__version__}",
    )


class _Meter:
    """Measures one device and its group, on a communicator of its own whose traffic is not read."""

    def __init__(self, communicator: Communicator, sizes: tuple[Sizes, Sizes]) -> None:
        self.communicator = Communicator(communicator.mesh, communicator.device)
        self.device = communicator.device
        self.sizes = sizes[is_gpu(self.device)]

    def _seconds(self, run: Callable[[], object], times: int = 3) -> float:
        """The least time of `run` in seconds, after a warm-up run; synchronizes with the device."""
        self.communicator.any_rank(torch.zeros(1, dtype=torch.int32))  # all ranks begin together
        least = math.inf
        for count in range(times + 1):
            before = time.perf_counter()
            run()
            synchronize(self.device)
            if count:
                least = min(least, time.perf_counter() - before)
        return least

    def _factor(self, dtype: torch.dtype, side: int) -> torch.Tensor:
        # Ones, not random numbers: the user's generators stay as they are.
        return torch.ones(side, side, dtype=dtype, device=self.device)

    def product_rate(self, dtype: torch.dtype) -> float:
        side = self.sizes.side // (1 if dtype is torch.float32 or is_gpu(self.device) else 2)
        factor = self._factor(dtype, side)
        return 2 * side**3 / self._seconds(lambda: factor @ factor)

    def memory_bandwidth(self) -> float:
        wide = torch.zeros(self.sizes.touched // 4, device=self.device)
        return 2 * wide.nbytes / self._seconds(lambda: wide.add_(1))

    def attention_rate(self) -> float:
        query = torch.ones(_ATTENTION, device=self.device)
        batch, heads, length, channels = _ATTENTION
        flops = 4 * batch * heads * length**2 * channels
        return flops / self._seconds(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query))

    def function_rate(self) -> float:
        """Elements per second at which tanh is computed, in addition to reading and writing them."""
        wide = torch.ones(self.sizes.touched // 16, device=self.device)
        out = torch.empty_like(wide)
        extra = self._seconds(lambda: torch.tanh(wide, out=out)) - self._seconds(lambda: torch.neg(wide, out=out))
        return wide.numel() / extra if extra > 0 else math.inf

    def launch(self) -> float:
        small = torch.zeros(16, device=self.device)

        def several() -> None:
            for _ in range(1000):
                small.add_(1)

        return self._seconds(several) / 1000

    def host_bandwidth(self) -> float:
        if not is_gpu(self.device):
            return math.inf
        host = torch.zeros(self.sizes.sent, dtype=torch.uint8, pin_memory=True)
        return host.nbytes / self._seconds(lambda: host.to(self.device))

    def link(self, ranks: AxisCommunicator) -> Link:
        """The link between these ranks; which of them are neighbours is not known here."""
        if ranks.size == 1:
            return Link("between ranks", 0.0, math.inf)
        share = self.sizes.sent // ranks.size
        latency = self._seconds(lambda: self._gather(1, ranks), times=20)
        seconds = self._seconds(lambda: self._gather(share, ranks))
        sent = share * (ranks.size - 1)
        hops = math.ceil(math.log2(ranks.size))
        return Link("between ranks", latency / hops, sent / max(seconds - latency, 1e-9))

    def sending(self) -> float:
        """Seconds of compute lost per byte that is sent in parallel."""
        ranks = self.communicator
        if ranks.size == 1:
            return 0.0
        share = self.sizes.sent // ranks.size
        factor = self._factor(torch.float32, self.sizes.side)
        gather = self._seconds(lambda: self._gather(share, ranks))
        products = math.ceil(3 * gather / self._seconds(lambda: factor @ factor))

        def compute() -> None:
            for _ in range(products):
                factor @ factor

        lost = self._seconds(lambda: self._gather(share, ranks, compute)) - self._seconds(compute)
        return max(lost, 0.0) / (share * (ranks.size - 1))

    def _gather(self, nbytes: int, ranks: AxisCommunicator, overlap: Callable[[], None] = lambda: None) -> None:
        """Gather `nbytes` of each of these ranks, and call `overlap` while they are in flight."""
        shard = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        work = ranks.collectives.all_gather(shard.new_empty(nbytes * ranks.size), shard)
        overlap()
        work.wait()
