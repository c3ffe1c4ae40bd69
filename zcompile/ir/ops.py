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

from zcompile.ir.axis import Axis
from zcompile.ir.layout import Layout, Message, secondary_bytes
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

ByteRange = tuple[int, int]
"""The bytes [start, stop) of the arena that a line has for what it gathers, or copies to be sent."""


# -- placeholders -----------------------------------------------------------------------------------------------------


def _takes_no_memory(op: Operation, node: fx.Node, layout: Layout) -> int:
    """The `memory` of lines whose value is in memory that is there anyway."""
    return 0


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
    memory = _takes_no_memory


class _Waits(Operation):
    __slots__ = ()
    role = Role.WAIT
    functions = ("wait",)


# -- communication ----------------------------------------------------------------------------------------------------


class Communication(Operation):
    """Starts a collective of the data-parallel ranks along one axis for the parameters of `unit`."""

    __slots__ = ()
    unit: str
    dtype: torch.dtype | None = None

    @property
    def averages(self) -> tuple[str, ...] | None:
        """The parameters whose gradients are sent; None: what is sharded is, itself."""
        return None

    @property
    def head(self) -> str:
        """What ranks compare in front of the unit and its messages."""
        return self.function

    @property
    def tail(self) -> str:
        """What they compare behind these."""
        return ""

    def over(self, layout: Layout) -> Axis:
        """The axis: that which shards."""
        return layout.sharded

    def messages(self, layout: Layout) -> tuple[Message, ...]:
        """What travels together."""
        return layout.unit(self.unit).sent(self.averages, self.dtype)

    def sent_dtype(self, message: Message) -> torch.dtype:
        """The dtype of a message, in what ranks compare."""
        return message.dtype

    def payload_of(self, message: Message, layout: Layout) -> int:
        """Bytes of the tensors that are moved for a message, padding included; an all_reduce moves them twice."""
        return message.nbytes

    def payload(self, layout: Layout) -> int:
        """Bytes of the tensors that are moved."""
        return sum(self.payload_of(message, layout) for message in self.messages(layout))

    def copied(self, layout: Layout) -> int:
        """Bytes of shards that are copied from the host first."""
        return 0

    def message_text(self, layout: Layout) -> str:
        """`all_gather blocks.0 (a f32[8, 4], b f32[4]+c f32[4])`: one entry a message, packed ones added."""
        texts = []
        for message in self.messages(layout):
            kind, owner = self.sent_dtype(message), "" if message.owner is None else f" owner {message.owner}"
            named = (f"{param.name} {TensorType.make(kind, param.shape)}" for param in message.params)
            texts.append("+".join(named) + owner)
        return f"{self.head} {self.unit} ({', '.join(texts)}){self.tail}"

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic:
        """Along the axis that shards each primary shard is a message of its own."""
        axis, messages = self.over(layout), self.messages(layout)
        count = sum(layout.parts if axis is layout.sharded and one.is_sharded else 1 for one in messages)
        return Traffic(axis, self.payload(layout), count, self.copied(layout))


class _Outside(Communication):
    """Along the outer axis: of what a rank has inside, which may be sent in fewer bits."""

    __slots__ = ()
    axis: str
    wire: torch.dtype | None

    @property
    def tail(self) -> str:
        """The axis, and what is sent."""
        return f" over {self.axis}" if self.wire is None else f" over {self.axis} in {dtype_text(self.wire)}"

    def over(self, layout: Layout) -> Axis:
        """The outer one."""
        return layout.axis(self.axis)

    def messages(self, layout: Layout) -> tuple[Message, ...]:
        """What a rank has inside."""
        unit, inside = layout.unit(self.unit), layout.sharded.size
        return unit.sent(self.averages, self.dtype, inside=inside, wire=self.wire)


class Gathering(Communication):
    """Starts gathering a unit, or its secondary shards. `keep`: beyond the program, gathered again after a change."""

    __slots__ = ()
    role = Role.GATHER
    functions = ("all_gather",)
    keep: bool

    @property
    def head(self) -> str:
        """With what is kept."""
        return f"{self.function} keep" if self.keep else self.function

    def copied(self, layout: Layout) -> int:
        """Those that this rank keeps, where they are away."""
        nbytes = sum(message.nbytes for message in self.messages(layout))
        return nbytes // self.over(layout).size if layout.away else 0


@dataclass(frozen=True, slots=True)
class AllGather(Gathering):
    """Start gathering a unit. `keep`: the full copy outlives the program and is gathered again only after a change."""

    takes: ClassVar[tuple[tuple[type, ...], ...]] = ((Shards,),)

    unit: str
    keep: bool = False
    dtype: torch.dtype | None = None
    """What shards are cast to before they are sent; None: sent as they are."""
    at: ByteRange | None = None

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """None in the arena, which is there anyway."""
        return 0 if self.at is not None else layout.gathered_bytes(self.unit)


@dataclass(frozen=True, slots=True)
class GatherOutside(_Outside, Gathering):
    """Start gathering the secondary shards of a unit: this rank's part of it inside, over the ranks of `axis`.

    `keep`: they outlive the program, and are gathered again only after a change. Where the full copy does, as in stages
    1 and 2, that is what is gathered again, here and inside.
    """

    takes = ((Shards,), (Group,))

    unit: str
    axis: str
    keep: bool = False
    dtype: torch.dtype | None = None
    """As of an `AllGather`."""
    wire: torch.dtype | None = None
    """In which shards are sent, if not in the dtype in which they are wanted: see `zcompile.ir.layout.Message`."""

    def sent_dtype(self, message: Message) -> torch.dtype:
        """That of secondary shards, or of what is encoded."""
        return message.wire or message.dtype

    def payload_of(self, message: Message, layout: Layout) -> int:
        """As it is sent."""
        return message.gathered_bytes(self.over(layout).size)

    def buffer_bytes(self, layout: Layout) -> int:
        """Bytes of the tensor that secondary shards are in."""
        return secondary_bytes([message.nbytes for message in self.messages(layout)])

    def encoded_bytes(self, layout: Layout) -> int:
        """Bytes of what arrives encoded, beside that tensor."""
        encoded = (message for message in self.messages(layout) if message.wire is not None)
        return sum(self.payload_of(message, layout) for message in encoded)

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """With what arrives encoded."""
        return data(node).nbytes + self.encoded_bytes(layout)


@dataclass(frozen=True, slots=True)
class WaitSecondary(_Waits):
    """The secondary shards of a unit, once they have arrived, as the bytes of one tensor."""

    takes = ((GatherOutside,),)

    unit: str

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """What has arrived encoded is freed."""
        return data(node).nbytes - op_of(node.all_input_nodes[0], GatherOutside).encoded_bytes(layout)


@dataclass(frozen=True, slots=True)
class GatherInside(AllGather):
    """Start gathering a unit from its secondary shards."""

    takes = ((Shards,), (WaitSecondary,))
    copied = Communication.copied

    @property
    def tail(self) -> str:
        """What is sent, which is more than primary shards."""
        return " from secondary shards"


@dataclass(frozen=True, slots=True)
class GatherAhead(Gathering):
    """Start gathering a unit for the next step's forward, whose `AllGather` of it then starts nothing."""

    functions = ("gather_ahead",)
    takes = ((Shards,),)
    gives = False
    inert = True
    head = Communication.head
    copied = Communication.copied

    unit: str
    keep: bool = False
    dtype: torch.dtype | None = None

    def payload_of(self, message: Message, layout: Layout) -> int:
        """Counted where the next step would gather it."""
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
    """Starts averaging gradients of `params`; `scatter`: each rank gets its part, else all."""

    __slots__ = ()
    role = Role.REDUCE
    functions = ("reduce_scatter", "all_reduce")
    params: tuple[str, ...]
    scatter: bool

    @property
    def function(self) -> str:
        """The first where it scatters."""
        return self.functions[0 if self.scatter else 1]

    @classmethod
    def meant_by(cls, function: str) -> dict[str, Any]:
        """Whether it scatters."""
        return {"scatter": function == cls.functions[0]}

    @property
    def averages(self) -> tuple[str, ...]:
        """Those with a gradient."""
        return self.params

    def payload_of(self, message: Message, layout: Layout) -> int:
        """Twice that of what every rank gets whole."""
        return message.averaged_bytes(self.over(layout).size, scatters=self.scatter and message.is_sharded)


@dataclass(frozen=True, slots=True)
class Reduce(Averaging):
    """Over the ranks that shard."""

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
    def tail(self) -> str:
        """The size of pieces."""
        return f" by {self.bucket}" if self.bucket else ""

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """This rank's part of the averages inside; alone, a gradient is its own average."""
        if not self.scatter or layout.sharded.size == 1:
            return 0
        params = [layout.param(name) for name in self.params]
        return sum(param.padded_numel * param.reduce_dtype.itemsize // layout.sharded.size for param in params)


@dataclass(frozen=True, slots=True)
class WaitGather(_Waits):
    """The full parameters of a unit, once they have arrived."""

    takes = ((AllGather,),)

    unit: str


@dataclass(frozen=True, slots=True)
class WaitReduce(_Waits):
    """The averaged gradients of `params`, once they have arrived."""

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
class ReduceOutside(_Outside, Averaging):
    """Over the ranks of `axis`: of averages over the ranks inside; `scatter`: each gets those of its primary shard."""

    unit: str
    params: tuple[str, ...]
    axis: str
    scatter: bool
    dtype: torch.dtype | None = None
    """As of the reduction before it."""
    wire: torch.dtype | None = None
    """In which averages are sent, if not in the dtype in which they are summed: see `zcompile.ir.layout.Message`."""

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """This rank's part of the averages; none where it works in place."""
        return self.inside_bytes(layout) // self.over(layout).size

    def inside_bytes(self, layout: Layout) -> int:
        """Bytes of the averages inside that it scatters, which are free once it has been waited for."""
        if not self.scatter or self.over(layout).size == 1:
            return 0
        params = [param for name in self.params if (param := layout.param(name)).shards]
        return sum(param.numel_of(layout.sharded.size) * param.reduce_dtype.itemsize for param in params)


@dataclass(frozen=True, slots=True)
class Release(Operation):
    """Free the full parameters of a unit."""

    role = Role.FREE
    functions = ("release",)
    takes = ((WaitGather,),)
    gives = False
    inert = True

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


# -- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store(Operation):
    """A saved activation copied onto the stack, so that its own memory is free again."""

    role = Role.VALUE
    functions = ("store",)
    takes = (ANY, (Stack,))
    memory = _takes_no_memory


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
class WaitFetch(_Waits):
    """The activation, once it is back."""

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
        type_ = data(node.all_input_nodes[0]).type
        return Traffic(layout.axis(self.axis), type_.nbytes if type_ else 0, to_one=True)


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
class WaitReceive(_Waits):
    """What another rank has sent, once it has arrived."""

    takes = ((Receive,),)


@dataclass(frozen=True, slots=True)
class WaitSend(_Waits):
    """The end of a sending: the value's memory may be used again."""

    takes = ((Send,),)
    gives = False
    inert = True


@dataclass(frozen=True, slots=True)
class Results(Operation):
    """The end of a program: see `zcompile.ir.program_graph.ResultsView`."""

    role = Role.RESULTS


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


def wait_of(started: fx.Node) -> fx.Node:
    """The wait for what a line has started."""
    (wait,) = [user for user in started.users if data(user).op.role is Role.WAIT]
    return wait


def called(value: fx.Node) -> fx.Node:
    """What gives a value: itself, or the call of which it is one of several results."""
    return value.all_input_nodes[0] if isinstance(data(value).op, Item) else value


def items_of(node: fx.Node) -> list[fx.Node]:
    """The results of a call that has several, in the order in which they are used first."""
    return [user for user in node.users if isinstance(data(user).op, Item)]


def is_part(node: fx.Node) -> bool:
    """True for a result of a call, of which its line names them; those of a result that is a tuple have their own."""
    made = called(node)
    return node.op == "call_function" and made is not node and called(made) is made


def values_of(node: fx.Node) -> list[fx.Node]:
    """The values that an operation gives: its results where it has several, else itself."""
    return items_of(node) or [node]
