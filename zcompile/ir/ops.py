"""The table of operations of the outer program: a class for each, with all that is known of it.

An outer program is a list of calls of the runtime's functions and of regions. They are never run from here: the printed
program is executed with the functions of `zcompile.runtime.executor` under the same names. A class says how its lines
are spelled, what they take, send, gain and free, and what they do to time; whatever prints, parses, checks, counts,
simulates or draws programs reads it from here (CONTRIBUTING.md shows how one is added).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, NoReturn

import torch
from torch import fx

from zcompile.ir.layout import Layout, Param
from zcompile.ir.operation import (
    ANY,
    GRADIENTS,
    Operation,
    Role,
    Traffic,
    data,
    op_of,
    options_of,
    takes,
)
from zcompile.ir.tensor_type import TensorType, dtype_text
from zcompile.ir.wire import average_payload, padded_to_blocks, secondary_bytes, shard_wire_bytes, wire_bytes

ByteRange = tuple[int, int]
"""The bytes [start, stop) of the arena that a line has for what it gathers, or copies to be sent."""


# -- placeholders -----------------------------------------------------------------------------------------------------


class Placeholder(Operation):
    """What a program is given. Lines unbox it by name, with what it is at the margin: `label`, and of which."""

    __slots__ = ()
    role = Role.PLACEHOLDER
    label: ClassVar[str]


class RuntimeInput(Placeholder):
    """What a program is lent for a run."""

    __slots__ = ()


class Kind(StrEnum):
    """What an input of a program is."""

    DATA = "data"
    TANGENT = "tangent"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Input(Placeholder):
    """What the caller fills; `index` is its place among the caller's arguments of this kind."""

    label = ""  # the module that it comes from, or what is special about it

    kind: Kind
    index: int
    mutated: bool = False
    """True if the forward writes to it: once it has run, the value that it read is gone."""
    held: str = ""
    """What it is if it is no argument of the call that ranks may be taken to have alike: a buffer's name, or `?`."""
    result: int | None = None
    """Of a tangent: the number of the forward's result that it is the gradient of, where that is known."""
    leaf: int | None = None
    """Its number among the tensors that a call is given, where that is known."""
    microbatch: int | None = None
    """Of a step of several micro-batches: the one that it is of; None of what is the same in all."""


@dataclass(frozen=True, slots=True)
class Parameter(Placeholder):
    """A full parameter, before regions are outlined."""

    label = "parameter"

    name: str


@dataclass(frozen=True, slots=True)
class Shards(Placeholder):
    """What this rank keeps of a unit."""

    label = "unit"

    unit: str


@dataclass(frozen=True, slots=True)
class Arena(RuntimeInput):
    """Memory that is kept from step to step, of which a program's lines are given their ranges."""

    label = "arena"


@dataclass(frozen=True, slots=True)
class Stack(RuntimeInput):
    """Memory that is kept from step to step, in which saved activations lie one behind the other."""

    label = "stack"


@dataclass(frozen=True, slots=True)
class OffloadStore(RuntimeInput):
    """Where activations are kept that the device has no memory for."""

    label = "away"


@dataclass(frozen=True, slots=True)
class Group(RuntimeInput):
    """The ranks of an axis: of tensor parallelism, which keep shards of activations, or of the outer one of two."""

    label = "group"

    axis: str


# -- compute ----------------------------------------------------------------------------------------------------------


class _Computes(Operation):
    __slots__ = ()
    role = Role.COMPUTE

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Its results'."""
        return data(node).nbytes + sum(data(item).nbytes for item in items_of(node))


@dataclass(frozen=True, slots=True)
class Compute(_Computes):
    """An ATen operation."""


@dataclass(frozen=True, slots=True)
class Call(_Computes):
    """A call of a region; its first arguments are the full parameters of `units`, in that order."""

    region: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Item(Operation):
    """One of several results."""

    role = Role.VALUE

    index: int

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Its call's."""
        return 0


# -- communication ----------------------------------------------------------------------------------------------------


class Communication(Operation):
    """Starts a collective of the data-parallel ranks for the parameters of `unit`."""

    __slots__ = ()
    unit: str

    @property
    def agreed(self) -> tuple[str, str]:
        """What ranks compare beside the unit and its messages, in front of them and behind."""
        return self.function, ""

    def sends(self, param: Param) -> bool:
        """True for a parameter of the unit that it has to do with."""
        return bool(param.shards)

    def sent_dtype(self, param: Param) -> torch.dtype:
        """In which it sends what it sends of `param`."""
        return param.full_dtype

    def message_text(self, layout: Layout) -> str:
        """`all_gather blocks.0 (a f32[8, 4], b f32[4]+c f32[4])`: one entry a message, packed ones added."""
        before, behind = self.agreed
        texts = []
        for params in self.messages(layout):
            types = (TensorType.make(self.sent_dtype(p), p.shape) for p in params)
            owner = "" if params[0].owner is None else f" owner {params[0].owner}"
            texts.append("+".join(f"{p.name} {type_}" for p, type_ in zip(params, types, strict=True)) + owner)
        return f"{before} {self.unit} ({', '.join(texts)}){behind}"

    def messages(self, layout: Layout) -> list[list[Param]]:
        """The parameters of each of its messages."""
        unit = layout.unit(self.unit)
        sent = ([unit.params[i] for i in message if self.sends(unit.params[i])] for message in unit.messages)
        return [params for params in sent if params]

    def message_bytes(self, layout: Layout) -> list[int]:
        """Bytes of each of its messages, padding included."""
        messages = self.messages(layout)
        return [sum(p.padded_numel * self.sent_dtype(p).itemsize for p in params) for params in messages]

    def payload(self, layout: Layout) -> int:
        """Bytes of the tensors that are moved, padding included; an all_reduce moves them twice."""
        return sum(param.padded_bytes for param in layout.unit(self.unit).params if param.shards)

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic:
        """Over the axis that shards, along which each primary shard is a message of its own."""
        times = layout.replicated.size if layout.replicated is not None and layout.has_secondary else 1
        count = sum(times if params[0].shards else 1 for params in self.messages(layout))
        return Traffic(layout.sharded, self.payload(layout), count, self.copied(layout))

    def copied(self, layout: Layout) -> int:
        """Bytes of shards that are copied from the host first."""
        return self.payload(layout) // layout.sharded.size if layout.away else 0


def _sent_in(wire: torch.dtype | None) -> str:
    """The dtype in which something is sent, in what ranks compare; empty if the line names none."""
    return "" if wire is None else f" in {dtype_text(wire)}"


@dataclass(frozen=True, slots=True)
class AllGather(Communication):
    """Start gathering a unit. `keep`: the full copy outlives the program and is gathered again only after a change."""

    role = Role.GATHER
    functions = ("all_gather",)
    takes: ClassVar[tuple[tuple[type, ...], ...]] = ((Shards,),)

    unit: str
    keep: bool = False
    dtype: torch.dtype | None = None
    """What shards are cast to before they are sent; None: sent as they are."""
    at: ByteRange | None = None

    @property
    def agreed(self) -> tuple[str, str]:
        """With what is kept."""
        return ("all_gather keep" if self.keep else "all_gather"), ""

    def sent_dtype(self, param: Param) -> torch.dtype:
        """That of the shard, unless the line names the one computed in."""
        return param.full_dtype if self.dtype is param.compute_dtype else param.dtype

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """None in the arena, which is there anyway."""
        return 0 if self.at is not None else layout.gathered_bytes(self.unit)


@dataclass(frozen=True, slots=True)
class GatherOutside(Communication):
    """Start gathering the secondary shards of a unit: this rank's part of it inside, over the ranks of `axis`.

    `keep`: they outlive the program, and are gathered again only after a change. Where the full copy does, as in stages
    1 and 2, that is what is gathered again, here and inside.
    """

    role = Role.GATHER
    functions = ("all_gather",)
    takes = ((Shards,), (Group,))

    unit: str
    axis: str
    keep: bool = False
    dtype: torch.dtype | None = None
    """As of an `AllGather`."""
    wire: torch.dtype | None = None
    """In which shards are sent, if not in the dtype in which they are wanted: see `zcompile.ir.wire`."""

    @property
    def agreed(self) -> tuple[str, str]:
        """With what is kept, the axis, and what is sent."""
        return ("all_gather keep" if self.keep else "all_gather"), f" over {self.axis}{_sent_in(self.wire)}"

    def is_encoded(self, param: Param) -> bool:
        """True for a parameter whose shards are encoded."""
        return self.wire is not None and param.outer_gather_dtype is self.wire

    def wanted_dtype(self, param: Param) -> torch.dtype:
        """That of secondary shards: of the shard, unless the line names the one computed in."""
        return param.full_dtype if self.dtype is param.compute_dtype else param.dtype

    def sent_dtype(self, param: Param) -> torch.dtype:
        """That of secondary shards, or of what is encoded."""
        return self.wire if self.wire is not None and self.is_encoded(param) else self.wanted_dtype(param)

    def message_bytes(self, layout: Layout) -> list[int]:
        """Of secondary shards, as they are sent."""
        return [self._sent_bytes(params, layout) for params in self.messages(layout)]

    def payload(self, layout: Layout) -> int:
        """That of secondary shards, as they are sent."""
        return sum(self.message_bytes(layout))

    def buffer_bytes(self, layout: Layout) -> int:
        """Bytes of the tensor that secondary shards are in."""
        return secondary_bytes([self._wanted_bytes(params, layout) for params in self.messages(layout)])

    def encoded_bytes(self, layout: Layout) -> int:
        """Bytes of what arrives encoded, beside that tensor."""
        encoded = [params for params in self.messages(layout) if self.is_encoded(params[0])]
        return sum(self._sent_bytes(params, layout) for params in encoded)

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """With what arrives encoded."""
        return data(node).nbytes + self.encoded_bytes(layout)

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic:
        """Over its axis. What is copied from the host is encoded behind that."""
        axis, messages = layout.axis(self.axis), self.messages(layout)
        copied = sum(self._wanted_bytes(params, layout) for params in messages) // axis.size if layout.away else 0
        return Traffic(axis, self.payload(layout), len(messages), copied)

    def _sent_bytes(self, params: list[Param], layout: Layout) -> int:
        if self.wire is None or not self.is_encoded(params[0]):
            return self._wanted_bytes(params, layout)
        return layout.axis(self.axis).size * sum(shard_wire_bytes(param.shard_numel, self.wire) for param in params)

    def _wanted_bytes(self, params: list[Param], layout: Layout) -> int:
        return sum(layout.numel_inside(param) * self.wanted_dtype(param).itemsize for param in params)


@dataclass(frozen=True, slots=True)
class WaitSecondary(Operation):
    """The secondary shards of a unit, once they have arrived, as the bytes of one tensor."""

    role = Role.WAIT
    functions = ("wait",)
    takes = ((GatherOutside,),)

    unit: str

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """What has arrived encoded is freed."""
        return data(node).nbytes - op_of(node.all_input_nodes[0], GatherOutside).encoded_bytes(layout)


@dataclass(frozen=True, slots=True)
class GatherInside(AllGather):
    """Start gathering a unit from its secondary shards."""

    takes = ((Shards,), (WaitSecondary,))

    @property
    def agreed(self) -> tuple[str, str]:
        """With what is sent, which is more than primary shards."""
        return ("all_gather keep" if self.keep else "all_gather"), " from secondary shards"

    def copied(self, layout: Layout) -> int:
        """Secondary shards are on the device."""
        return 0


@dataclass(frozen=True, slots=True)
class GatherAhead(Communication):
    """Start gathering a unit for the next step's forward, whose `AllGather` of it then starts nothing."""

    role = Role.GATHER
    functions = ("gather_ahead",)
    takes = ((Shards,),)
    gives = False

    unit: str
    keep: bool = False
    dtype: torch.dtype | None = None

    def sent_dtype(self, param: Param) -> torch.dtype:
        """That of the shard, unless the line names the one computed in."""
        return param.full_dtype if self.dtype is param.compute_dtype else param.dtype

    def payload(self, layout: Layout) -> int:
        """It counts where the next step would gather it."""
        return 0

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """None where it arrives in the memory of the copy that the forward has gathered."""
        return 0 if self.keep else layout.gathered_bytes(self.unit)


@dataclass(frozen=True, slots=True)
class Sum(Operation):
    """Add further gradients of this rank's own, of a unit or of some of its parameters, in the memory of the first."""

    role = Role.VALUE
    functions = ("add",)

    unit: str
    params: tuple[str, ...]
    dtype: torch.dtype | None = None
    """In which the sum is, where that is not the dtype of gradients: it has memory of its own then."""


SUMMED = (*GRADIENTS, Sum)
"""An argument that lists gradients of a unit, or is their sum over several micro-batches."""
Sum.takes = ((Shards,), SUMMED, GRADIENTS)


class Averaging(Communication):
    """Starts averaging gradients of `params`."""

    __slots__ = ()
    role = Role.REDUCE
    params: tuple[str, ...]
    dtype: torch.dtype | None

    def sends(self, param: Param) -> bool:
        """Those with a gradient."""
        return param.name in self.params

    def sent_dtype(self, param: Param) -> torch.dtype:
        """That of gradients, unless the line names the one reduced in."""
        return param.reduce_dtype if self.dtype is param.reduction_dtype else param.full_dtype

    def copied(self, layout: Layout) -> int:
        """Gradients are on the device."""
        return 0


@dataclass(frozen=True, slots=True)
class Reduce(Averaging):
    """Over the ranks that shard; `scatter`: each rank gets its shard, else all."""

    functions = ("reduce_scatter", "all_reduce")
    takes = ((Shards,), SUMMED)

    unit: str
    params: tuple[str, ...]
    scatter: bool
    dtype: torch.dtype | None = None
    """What gradients are cast to before they are sent; None: sent as they are."""
    bucket: int | None = None
    """Bytes of a piece of what is copied to be sent; None: it is copied as a whole."""
    at: ByteRange | None = None

    @property
    def function(self) -> str:
        """The first where it scatters."""
        return self.functions[0 if self.scatter else 1]

    @classmethod
    def meant_by(cls, function: str) -> dict[str, Any]:
        """Whether it scatters."""
        return {"scatter": function == cls.functions[0]}

    @property
    def agreed(self) -> tuple[str, str]:
        """With the size of pieces."""
        return self.function, f" by {self.bucket}" if self.bucket else ""

    def payload(self, layout: Layout) -> int:
        """Twice that of what every rank gets whole."""
        params = [layout.param(name) for name in self.params]
        factors = [1 if self.scatter and p.shards else 2 for p in params]
        return sum(p.padded_numel * p.reduce_dtype.itemsize * f for p, f in zip(params, factors, strict=True))

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """This rank's part of the averages inside; alone, a gradient is its own average."""
        if not self.scatter or layout.sharded.size == 1:
            return 0
        params = [layout.param(name) for name in self.params]
        return sum(param.padded_numel * param.reduce_dtype.itemsize // layout.sharded.size for param in params)


@dataclass(frozen=True, slots=True)
class WaitGather(Operation):
    """The full parameters of a unit, once they have arrived."""

    role = Role.WAIT
    functions = ("wait",)
    takes = ((AllGather,),)

    unit: str


@dataclass(frozen=True, slots=True)
class WaitReduce(Operation):
    """The averaged gradients of `params`, once they have arrived."""

    role = Role.WAIT
    functions = ("wait",)
    takes = ((Averaging,),)

    unit: str
    params: tuple[str, ...]
    added: bool = False
    """True of averages that are added up before they go where their shards are, if that is elsewhere."""

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """What has been averaged inside is freed, where the ranks outside have got parts of it."""
        (started,) = node.all_input_nodes
        op = data(started).op
        return -op.inside_bytes(layout) if isinstance(op, ReduceOutside) else 0


@dataclass(frozen=True, slots=True)
class ReduceOutside(Averaging):
    """Over the ranks of `axis`: of averages over the ranks inside; `scatter`: each gets those of its primary shard."""

    functions = ("all_reduce", "reduce_scatter")

    unit: str
    params: tuple[str, ...]
    axis: str
    scatter: bool
    dtype: torch.dtype | None = None
    """As of the reduction before it."""
    wire: torch.dtype | None = None
    """In which averages are sent, if not in the dtype in which they are summed: see `zcompile.ir.wire`."""

    @property
    def function(self) -> str:
        """The second where it scatters."""
        return self.functions[1 if self.scatter else 0]

    @classmethod
    def meant_by(cls, function: str) -> dict[str, Any]:
        """Whether it scatters."""
        return {"scatter": function == cls.functions[1]}

    @property
    def agreed(self) -> tuple[str, str]:
        """With the axis, and what is sent."""
        return self.function, f" over {self.axis}{_sent_in(self.wire)}"

    def message_bytes(self, layout: Layout) -> list[int]:
        """Of what a rank has inside, as it is sent."""
        messages = zip(self._payloads(layout), self.messages(layout), strict=True)
        return [nbytes // (1 if self._scatters(params) else 2) for nbytes, params in messages]

    def payload(self, layout: Layout) -> int:
        """That of what a rank has inside; twice that of what every rank gets whole."""
        return sum(self._payloads(layout))

    def _scatters(self, params: list[Param]) -> bool:
        """Whether ranks get parts of the message with these."""
        return self.scatter and bool(params[0].shards)

    def _payloads(self, layout: Layout) -> list[int]:
        ranks, result = layout.axis(self.axis).size, []
        for params in self.messages(layout):
            kind, scatters = self.sent_dtype(params[0]), self._scatters(params)
            numel = sum(layout.numel_inside(param) for param in params)
            if self.wire is None or self.wire is kind or self.wire is not params[0].outer_dtype:
                result.append((1 if scatters else 2) * numel * kind.itemsize)
            elif scatters:
                result.append(ranks * wire_bytes(padded_to_blocks(numel // ranks), self.wire))
            else:
                result.append(average_payload(numel, ranks, self.wire))
        return result

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic:
        """Over its axis."""
        return Traffic(layout.axis(self.axis), self.payload(layout), len(self.messages(layout)))

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """This rank's part of the averages; none where it works in place."""
        return self.inside_bytes(layout) // layout.axis(self.axis).size

    def inside_bytes(self, layout: Layout) -> int:
        """Bytes of the averages inside that it scatters, which are free once it has been waited for."""
        if not self.scatter or layout.axis(self.axis).size == 1:
            return 0
        params = [param for name in self.params if (param := layout.param(name)).shards]
        return sum(layout.numel_inside(param) * param.reduce_dtype.itemsize for param in params)


@dataclass(frozen=True, slots=True)
class Release(Operation):
    """Free the full parameters of a unit."""

    role = Role.FREE
    functions = ("release",)
    takes = ((WaitGather,),)
    gives = False

    unit: str

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """What was gathered outside of the arena is freed."""
        gathers = (source for full in node.all_input_nodes for source in full.all_input_nodes)
        placed = any(isinstance(op := data(gather).op, AllGather) and op.at is not None for gather in gathers)
        return 0 if placed else -layout.gathered_bytes(self.unit)


# -- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SumAverages(Operation):
    """Add further averaged gradients, of a unit or of some of its parameters, in the memory of the first."""

    role = Role.VALUE
    functions = ("add",)

    unit: str
    params: tuple[str, ...]

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """What is added is freed."""
        return -averages_bytes(node.all_input_nodes[2], layout)


AVERAGES = (WaitReduce, SumAverages)
"""An argument that is averaged gradients, of one micro-batch or the sum over several."""
SumAverages.takes = ((Shards,), AVERAGES, (WaitReduce,))
ReduceOutside.takes = ((Shards,), AVERAGES, (Group,))


@dataclass(frozen=True, slots=True)
class Update(Operation):
    """Let the optimizer use the averaged gradients of `params`, and free them."""

    role = Role.UPDATE
    functions = ("update",)
    takes = ((Shards,), AVERAGES)
    gives = False

    unit: str
    params: tuple[str, ...]

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """What is left of what their reductions have taken."""
        return -averages_bytes(node.all_input_nodes[1], layout)


@dataclass(frozen=True, slots=True)
class Accumulate(Operation):
    """Hold this rank's own gradients of `params` back: they are reduced with those of a later backward."""

    role = Role.VALUE
    functions = ("accumulate",)
    takes = ((Shards,), GRADIENTS)

    unit: str
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plus(Operation):
    """The sum of two values: of gradients of a parameter that another pipeline stage keeps, over micro-batches."""

    role = Role.VALUE
    functions = ("plus",)
    takes = (ANY, ANY)

    dtype: torch.dtype | None = None
    """In which the sum is, where that is not the dtype of gradients."""


@dataclass(frozen=True, slots=True)
class Copy(Operation):
    """A value copied for who must own it: its memory belongs to another value too, or to a CUDA graph."""

    role = Role.VALUE
    functions = ("copy",)
    takes = (ANY,)

    strided: bool = False
    """Laid out like the value; a gradient is copied to be contiguous."""


@dataclass(frozen=True, slots=True)
class Write(Operation):
    """Let a buffer of the model have a new value."""

    role = Role.VALUE
    functions = ("write",)
    takes = ((Input,), ANY)
    gives = False

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """None: it is the buffer's."""
        return 0


# -- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store(Operation):
    """A saved activation copied onto the stack, so that its own memory is free again."""

    role = Role.VALUE
    functions = ("store",)
    takes = (ANY, (Stack,))

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """None: a stack is there anyway."""
        return 0


@dataclass(frozen=True, slots=True)
class Offload(Operation):
    """What stands for an activation from where it is on its way out, until it is fetched."""

    role = Role.MOVE
    functions = ("offload",)
    takes = (ANY, (OffloadStore, Group))


@dataclass(frozen=True, slots=True)
class Fetch(Operation):
    """Start bringing an activation back."""

    role = Role.MOVE
    functions = ("fetch",)
    takes = (ANY, (OffloadStore, Group))

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic | None:
        """The ranks of a group send each other their shards."""
        place = data(node.all_input_nodes[1]).op
        return Traffic(layout.axis(place.axis), data(node).nbytes) if isinstance(place, Group) else None


@dataclass(frozen=True, slots=True)
class WaitFetch(Operation):
    """The activation, once it is back."""

    role = Role.WAIT
    functions = ("wait",)
    takes = ((Fetch,),)


# -- between pipeline stages ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send(Operation):
    """Start sending a value to the rank at place `to` of `axis`. Until it has been waited for, the value is kept."""

    role = Role.SEND
    functions = ("send",)
    takes = (ANY, (Group,))

    axis: str
    to: int = -1
    message: str = ""
    """What is sent: the micro-batch, and the value's name in the traced step."""
    strides: tuple[int, ...] | None = None
    """In which it arrives, in elements; None where that is contiguous."""

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic:
        """All of it to one rank."""
        return Traffic(layout.axis(self.axis), _shown_bytes(node.all_input_nodes[0]), to_one=True)


@dataclass(frozen=True, slots=True)
class Receive(Operation):
    """Start receiving what the rank at place `source` of `axis` sends: a tensor of the type that the line says."""

    role = Role.RECEIVE
    functions = ("recv",)
    takes = ((Group,), (str,))

    axis: str
    source: int = -1
    message: str = ""
    """As of the line that sends it."""
    strides: tuple[int, ...] | None = None
    """In elements; None where it is contiguous."""


@dataclass(frozen=True, slots=True)
class WaitReceive(Operation):
    """What another rank has sent, once it has arrived."""

    role = Role.WAIT
    functions = ("wait",)
    takes = ((Receive,),)


@dataclass(frozen=True, slots=True)
class WaitSend(Operation):
    """The end of a sending: the value's memory may be used again."""

    role = Role.WAIT
    functions = ("wait",)
    takes = ((Send,),)
    gives = False

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class Results(Operation):
    """The end of a program: see `zcompile.ir.program_graph.ResultsView`."""

    role = Role.RESULTS

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """None."""
        return 0


# -- the table --------------------------------------------------------------------------------------------------------

_LINES: tuple[type[Operation], ...] = (
    AllGather,
    GatherAhead,
    Sum,
    Reduce,
    WaitGather,
    WaitReduce,
    SumAverages,
    ReduceOutside,
    GatherOutside,
    WaitSecondary,
    GatherInside,
    Release,
    Update,
    Accumulate,
    Plus,
    Copy,
    Write,
    Store,
    Offload,
    Fetch,
    WaitFetch,
    Send,
    Receive,
    WaitReceive,
    WaitSend,
)
RUNTIME_INPUTS: tuple[type[RuntimeInput], ...] = (Arena, Stack, OffloadStore, Group)
GRADIENT_LISTS = tuple(kind for kind in _LINES if kind.takes and kind.takes[-1] in (GRADIENTS, SUMMED))
"""What takes a list of gradients, and empties it."""


def _stand_in(name: str) -> Callable[..., NoReturn]:
    """What stands in a graph for the runtime's function `name`."""

    def only_a_name(*_: Any, **__: Any) -> NoReturn:
        message = f"{name} stands for an operation of the runtime; lower the program to run it"
        raise TypeError(message)

    only_a_name.__name__ = only_a_name.__qualname__ = name
    return only_a_name


region = _stand_in("region")
"""Called with the name of a region and its arguments; printed as a call of the region."""
FUNCTIONS: Mapping[str, Callable[..., NoReturn]] = {
    name: _stand_in(name) for name in dict.fromkeys(name for kind in _LINES for name in kind.functions)
}
"""What stands in a graph for the runtime's functions, by name."""
NAMES = frozenset({*FUNCTIONS, "torch", "unbox", "aten", "ops", "box", "graph"})
"""Names with a meaning in a printed program; no value is called so."""


def operation(name: str, given: Sequence[Any], keywords: Mapping[str, Any], layout: Layout) -> Operation:
    """What a call of the runtime's function `name` is.

    Args:
        name: As it is printed.
        given: Its arguments, in place of each value the operation that gives it.
        keywords: What it is given by name.
        layout: The units of the program.
    """
    kinds = [kind for kind in _LINES if name in kind.functions]
    kind = next((kind for kind in kinds if takes(kind, tuple(given))), kinds[0])
    unit: str = getattr(given[0], "unit", "") if given else ""
    values: dict[str, Any] = {"unit": unit, "params": (), **kind.meant_by(name)}
    # The first has all parameters of a sum; what is added to it may have fewer.
    values |= {name: getattr(one, name) for one in reversed(given) for name in ("params", "axis") if hasattr(one, name)}
    if kind in GRADIENT_LISTS and not isinstance(given[1], Sum):
        named = zip(layout.unit(unit).params, given[1], strict=True)
        values["params"] = tuple(param.name for param, gradient in named if gradient is not None)
    values |= {option: value for option, value in keywords.items() if option in options_of(kind)}
    return kind(**{one.name: values[one.name] for one in fields(kind) if one.name in values})  # type: ignore[arg-type]


def reductions_of(averages: fx.Node) -> list[fx.Node]:
    """The reductions behind which averages stand, the last first, one for each axis; of a sum those of the first."""
    if isinstance(data(averages).op, SumAverages):
        return reductions_of(averages.all_input_nodes[1])
    (last,) = averages.all_input_nodes
    return [last, *reductions_of(last.all_input_nodes[1])] if isinstance(data(last).op, ReduceOutside) else [last]


def averages_bytes(averages: fx.Node, layout: Layout) -> int:
    """Bytes that averaged gradients have, of what their reductions have taken; of a sum, those of the first."""
    while isinstance(data(averages).op, SumAverages):
        averages = averages.all_input_nodes[1]
    return sum(data(one).op.memory(one, layout) for one in (averages, *reductions_of(averages)))


def _shown_bytes(value: fx.Node) -> int:
    """Bytes of what a value shows, whosever memory it is."""
    type_ = data(value).type
    return type_.nbytes if type_ else 0


def items_of(node: fx.Node) -> list[fx.Node]:
    """The results of a call that has several, in the order in which they are used first."""
    return [user for user in node.users if isinstance(data(user).op, Item)]


def is_part(node: fx.Node) -> bool:
    """True for a result of a call, of which its line names them; those of a result that is a tuple have their own."""
    return _is_item(node) and not _is_item(node.all_input_nodes[0])


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(data(node).op, Item)


def values_of(node: fx.Node) -> list[fx.Node]:
    """The values that an operation gives: its results where it has several, else itself."""
    return items_of(node) or [node]
