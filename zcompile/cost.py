"""What work costs: FLOPs and bytes of a region, seconds by a roofline, seconds of a collective by alpha and beta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from zcompile.ops import Call, Compute, Item, data, op_of

if TYPE_CHECKING:
    from zcompile.program import Region


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device and its link."""

    flops: float
    """Floating-point operations per second."""
    memory_bandwidth: float
    """Bytes per second to the device's memory."""
    latency: float
    """Seconds before the first byte of a collective (alpha)."""
    bandwidth: float
    """Bytes per second that one rank sends (1 / beta)."""


DEFAULT_HARDWARE = Hardware(flops=50e9, memory_bandwidth=10e9, latency=200e-6, bandwidth=125e6)
"""One CPU core and a 1 Gbit/s link; relative sizes are what the report uses."""


NCCL_HARDWARE = Hardware(flops=100e12, memory_bandwidth=1.5e12, latency=20e-6, bandwidth=25e9)
"""A GPU with a 200 Gbit/s link."""
_LATENCY_SHARE = 1 / 20
_BUCKETS = (2**20, 64 * 2**20)


def bucket_for(hardware: Hardware) -> int:
    """Bytes of a message that spends a twentieth of its time on latency; from 1 to 64 MiB."""
    least, most = _BUCKETS
    wanted = hardware.latency * hardware.bandwidth / _LATENCY_SHARE if hardware.latency else most
    return int(min(max(wanted, least), most))


def seconds_of(flops: float, touched: float, wire: float, hardware: Hardware) -> float:
    """Roofline time of `flops` over `touched` bytes, or the alpha-beta time of `wire` bytes sent."""
    if wire:
        return hardware.latency + wire / hardware.bandwidth
    return max(flops / hardware.flops, touched / hardware.memory_bandwidth)


def flops_of(node: fx.Node, regions: Mapping[str, Region]) -> tuple[int, int]:
    """FLOPs of a node, and the bytes that it reads and writes; (0, 0) for what does not compute."""
    op = data(node).op
    if isinstance(op, Call):
        inner = [aten_cost(n) for n in regions[op.region].graph.nodes if n.op == "call_function"]
        return sum(flops for flops, _ in inner), sum(touched for _, touched in inner)
    return aten_cost(node) if isinstance(op, Compute) else (0, 0)


def aten_cost(node: fx.Node) -> tuple[int, int]:
    """FLOPs of an ATen operation, and the bytes that it reads and writes; none of either for a view."""
    held = data(node)
    touched = 0 if held.view else held.nbytes + sum(_bytes(source) for source in node.all_input_nodes)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0, touched
    shapes, keywords = fx.map_arg((node.args, node.kwargs), _shape)  # torch's formulas take shapes for tensors
    return int(formula(*shapes, **keywords, out_val=_shapes_given(node))), touched


def _shapes_given(node: fx.Node) -> tuple[Any, ...]:
    """Shape of the result, or of each of several; empty for one that nobody uses."""
    held = data(node)
    if held.type:
        return held.type.shape
    given = {op_of(user, Item).index: data(user).type for user in node.users if isinstance(data(user).op, Item)}
    return tuple(found.shape if (found := given.get(index)) else () for index in range(max(given, default=-1) + 1))


def _shape(node: fx.Node) -> Any:
    held = data(node)
    return held.type.shape if held.type else 1


def _bytes(node: fx.Node) -> int:
    held = data(node)
    return held.type.nbytes if held.type else 0
