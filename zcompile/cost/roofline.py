"""FLOPs and bytes of operations from their shapes, and seconds by a roofline model.

By the roofline (Williams et al. 2009), an operation takes the longer of two times: its FLOPs at the rate of the device,
and its reads and writes at the rate of memory. In a region that a compiler fuses, operations that fuse read and write
only values that are stored: see `zcompile.cost.fusion`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zcompile.cost.fusion import fuses, is_stored
from zcompile.cost.hardware import Hardware
from zcompile.ir.layout import Layout
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Call, Compute, Item, values_of
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.ir.row_axes import attended
from zcompile.ir.side_effects import changes_division, is_collective, is_ring, is_wait
from zcompile.torch_internals.ring_attention import RINGS

_LATENCY_SHARE = 1 / 20
_BUCKETS = (2**20, 64 * 2**20)

aten = torch.ops.aten
_FUNCTIONS = frozenset(
    {
        aten._log_softmax,
        aten._softmax,
        aten._softmax_backward_data,
        aten._log_softmax_backward_data,
        aten.bernoulli,
        aten.cos,
        aten.erf,
        aten.exp,
        aten.gelu,
        aten.gelu_backward,
        aten.log,
        aten.log1p,
        aten.native_dropout,
        aten.pow,
        aten.rand_like,
        aten.sigmoid,
        aten.sigmoid_backward,
        aten.silu,
        aten.silu_backward,
        aten.sin,
        aten.softplus,
        aten.tanh,
    }
)
"""Elementwise operations that take longer to compute than to read on a processor without special function units."""


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, *_repeated(query, key, value)))


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, *_repeated(query, key, value)))


def _repeated(query: Any, *shapes: Any) -> list[tuple[int, ...]]:
    """Return shapes of keys and values with one head per query head: torch 2.11's formulas accept no shared heads."""
    return [(shape[0], query[1], *shape[2:]) for shape in shapes]


def _formulas() -> Iterator[tuple[Any, Callable[..., int]]]:
    """Yield the formulas of attention, by operator; in a ring, queries meet the keys of all ranks."""
    for kernel, ring in RINGS.items():
        one = _attention_backward_flops if "backward" in str(kernel) else _attention_flops
        yield kernel.overloadpacket, one
        yield ring.overloadpacket, lambda *shapes, size, one=one, **_: size * one(*shapes)


FORMULAS: Mapping[Any, Callable[..., int]] = {**flop_registry, **dict(_formulas())}
"""Torch's FLOP formulas, with those of attention also for the operators of other devices, and for rings of ranks."""


def bucket_for(hardware: Hardware, stride: int = 1) -> int:
    """Return the bytes of a message that spends a twentieth of its time on latency; from 1 to 64 MiB."""
    least, most = _BUCKETS
    link = hardware.slowest(stride)
    wanted = link.latency * link.bandwidth / _LATENCY_SHARE if link.latency else most
    return int(min(max(wanted, least), most))


def region_seconds(region: Region, hardware: Hardware, layout: Layout | None = None) -> float:
    """Return the seconds of a region on `hardware`: those of its operations, one after another.

    Collectives in the region are over the axes of `layout` that divide values; what is computed before the wait for one
    hides it. The turns of a loop over rows count all.
    """
    now = link = 0.0
    arrived = dict[fx.Node, float]()
    for node in region.graph.nodes:
        if node.op != "call_function" or not isinstance(data(node).op, Compute):
            continue
        if is_wait(node):
            now = max(now, arrived.get(node.all_input_nodes[0], 0.0))
        elif is_collective(node):
            link = max(now, link) + (collective_seconds(node, hardware, layout) if layout else 0.0)
            arrived[node] = link
            now = now if any(map(is_wait, node.users)) else link
        if is_ring(node) or not (is_collective(node) or is_wait(node)):
            now += _seconds_within(node, region, hardware)
    return region.turns * now


def collective_seconds(node: fx.Node, hardware: Hardware, layout: Layout) -> float:
    """Return the seconds of a collective within a region; its payload is the larger of input and output.

    Those of attention in a ring are what its own computation does not hide.
    """
    axis = layout.sequence if changes_division(node) else layout.tensor
    if axis is None or _packet(node).__name__ == "shard":
        return 0.0
    if is_ring(node):
        hops = (axis.size - 1) * (2 if "backward" in str(node.target) else 1)
        payload = ring_bytes(node, axis.size) * axis.size / max(axis.size - 1, 1)
        return max(hardware.collective_seconds(payload, axis, hops) - operation_seconds(node, hardware), 0.0)
    payload = max(sum(data(value).nbytes for value in values_of(node)), sum(map(_bytes, node.all_input_nodes)))
    reduces = _packet(node).__name__.startswith("all_reduce")
    return hardware.collective_seconds(payload * (2 if reduces else 1), axis)


def ring_bytes(node: fx.Node, size: int) -> int:
    """Return the bytes of keys and values that a rank of a ring receives, and in a backward of their gradients."""
    backward = "backward" in str(node.target)
    types = [found for value in attended(node)[-2:] if (found := data(value).type)]
    return sum(
        math.prod(found.shape) * (found.dtype.itemsize * (size - 1) + max(found.dtype.itemsize, 4) * size * backward)
        for found in types
    )


def operation_seconds(node: fx.Node, hardware: Hardware, touched: int | None = None) -> float:
    """Return the seconds of a single ATen operation; `touched`: the bytes that it reads and writes, None for all."""
    flops, everything = aten_cost(node)
    if not everything:
        return 0.0
    rate = hardware.flops_in(_dtype(node)) * (hardware.attention if _is_attention(node) else 1.0)
    functions = _elements(node) / hardware.functions if _packet(node) in _FUNCTIONS else 0.0
    moved = (everything if touched is None else touched) / (hardware.memory_bandwidth * hardware.elementwise)
    return max(flops / rate, moved) + functions


def _seconds_within(node: fx.Node, region: Region, hardware: Hardware) -> float:
    if not region.fuses or not fuses(node):
        return operation_seconds(node, hardware) + (0.0 if data(node).view else hardware.launch)
    written = [value for value in values_of(node) if is_stored(value)]
    touched = sum(data(value).nbytes for value in written)
    if written:
        touched += sum(data(source).nbytes for source in _read_by(node))
    return operation_seconds(node, hardware, touched) + (hardware.launch if written else 0.0)


def _read_by(node: fx.Node) -> set[fx.Node]:
    """Return the values in memory that the kernel of a fused operation reads."""
    result: set[fx.Node] = set()
    waiting, seen = list(node.all_input_nodes), {node}
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        through = data(source).view or isinstance(data(source).op, Item) or (fuses(source) and not is_stored(source))
        if source.op == "call_function" and through:
            waiting += source.all_input_nodes
        else:
            result.add(source)
    return result


def line_seconds(program: Program, line: fx.Node, hardware: Hardware) -> float:
    """Return the seconds of a line on `hardware`; for communication, from launch to completion."""
    op = data(line).op
    if traffic := program.traffic(line):
        if traffic.to_one:
            return hardware.message_seconds(traffic.payload, traffic.axis)
        sent = hardware.collective_seconds(traffic.payload, traffic.axis, traffic.messages)
        return traffic.copied / hardware.host_bandwidth + sent
    if isinstance(op, Call):
        return region_seconds(program.regions[op.region], hardware, program.layout)
    return operation_seconds(line, hardware) if isinstance(op, Compute) else 0.0


def flops_of(node: fx.Node, regions: Mapping[str, Region]) -> int:
    """Return the FLOPs of a node; 0 if it does not compute."""
    op = data(node).op
    if isinstance(op, Call):
        called = regions[op.region]
        return int(called.turns * sum(aten_cost(n)[0] for n in called.graph.nodes if n.op == "call_function"))
    return aten_cost(node)[0] if isinstance(op, Compute) else 0


def aten_cost(node: fx.Node) -> tuple[int, int]:
    """Return the FLOPs of an ATen operation, and the bytes that it reads and writes; 0 bytes for a view."""
    meta = data(node)
    touched = 0 if meta.view else meta.nbytes + sum(_bytes(source) for source in node.all_input_nodes)
    formula = FORMULAS.get(_packet(node))
    if formula is None:
        return 0, touched
    shapes, keywords = fx.map_arg((node.args, node.kwargs), _shape)  # torch's formulas take shapes for tensors
    return int(formula(*shapes, **keywords, out_val=_shapes_given(node))), touched


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_attention(node: fx.Node) -> bool:
    return "scaled_dot_product" in str(node.target)


def _dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of the first tensor that an operation reads, else of its result."""
    types = (data(value).type for value in (*node.all_input_nodes, *values_of(node)))
    return next((found.dtype for found in types if found), torch.float32)


def _elements(node: fx.Node) -> int:
    """Return the number of elements of the largest tensor that an operation reads or returns."""
    types = (data(value).type for value in (*node.all_input_nodes, *values_of(node)))
    return max((math.prod(found.shape) for found in types if found), default=0)


def _shapes_given(node: fx.Node) -> tuple[Any, ...]:
    """Return the shape of the result, or a tuple of the shapes of all results; () for an unused one."""
    meta = data(node)
    if meta.type:
        return meta.type.shape
    given = {op_of(user, Item).index: data(user).type for user in node.users if isinstance(data(user).op, Item)}
    return tuple(found.shape if (found := given.get(index)) else () for index in range(max(given, default=-1) + 1))


def _shape(node: fx.Node) -> Any:
    meta = data(node)
    return meta.type.shape if meta.type else 1


def _bytes(node: fx.Node) -> int:
    meta = data(node)
    return meta.type.nbytes if meta.type else 0
