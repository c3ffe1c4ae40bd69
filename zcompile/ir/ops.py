"""The table of operations of the outer program: one class each, with everything that is known about it.

An outer program is a list of calls of runtime functions and of regions. They are never run from here: the printed
program is executed with the functions of `zcompile.runtime.executor` of the same names. A class defines how its lines
are printed, their arguments, what they send, allocate and free, and how they take time; the code that prints, parses,
checks, measures, simulates or draws programs reads it from here (CONTRIBUTING.md shows how to add an operation).
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
from zcompile.ir.placement import RowLoop
from zcompile.ir.tensor_type import TensorType, dtype_text

ByteRange = tuple[int, int]
"""The bytes [start, stop) of the arena that a line gathers into, or copies gradients into to send them."""


# -- placeholders -----------------------------------------------------------------------------------------------------


def _takes_no_memory(op: Operation, node: fx.Node, layout: Layout) -> int:
    """The `memory` of lines that allocate nothing."""
    return 0


class Placeholder(Operation):
    """An input of a program, unboxed by name; the margin shows its `label` and fields."""

    __slots__ = ()
    role = Role.PLACEHOLDER
    label: ClassVar[str]


class RuntimeInput(Placeholder):
    """An input that the runtime provides for a run."""

    __slots__ = ()


class Kind(StrEnum):
    """The kind of an input: an argument, a gradient that the backward begins with, or a constant of the graph."""

    DATA = "data"
    TANGENT = "tangent"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Input(Placeholder):
    """An input that the caller provides; `index` is its index among the caller's arguments of this kind."""

    label = ""  # the margin shows its module, its kind, or `mutated`

    kind: Kind
    index: int
    mutated: bool = False
    """True if the forward overwrites it."""
    held: str = ""
    """Empty for an argument of the call that ranks are assumed to have alike; else a buffer's name, or `?`."""
    result: int | None = None
    """For a tangent, the number of the forward's result that it is the gradient of, if known."""
    leaf: int | None = None
    """Its index among the tensors that the call receives, if known."""
    microbatch: int | None = None
    """In a step of several micro-batches, the micro-batch that it belongs to; None if they all share it."""


@dataclass(frozen=True, slots=True)
class Parameter(Placeholder):
    """A full parameter, before regions are outlined."""

    label = "parameter"

    name: str


@dataclass(frozen=True, slots=True)
class Shards(Placeholder):
    """This rank's shards of a unit."""

    label = "unit"

    unit: str


@dataclass(frozen=True, slots=True)
class Arena(RuntimeInput):
    """Memory that is kept from step to step, in which lines have fixed byte ranges."""

    label = "arena"


@dataclass(frozen=True, slots=True)
class Stack(RuntimeInput):
    """Memory that is kept from step to step, in which saved activations are stored consecutively."""

    label = "stack"


@dataclass(frozen=True, slots=True)
class OffloadStore(RuntimeInput):
    """The storage for offloaded activations, outside device memory."""

    label = "away"


@dataclass(frozen=True, slots=True)
class Group(RuntimeInput):
    """The ranks along an axis: a tensor or pipeline axis, or the outer one of two data-parallel axes."""

    label = "group"

    axis: str


# -- compute ----------------------------------------------------------------------------------------------------------


class _Computes(Operation):
    __slots__ = ()
    role = Role.COMPUTE

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Bytes of the results."""
        return data(node).nbytes + sum(data(item).nbytes for item in items_of(node))


@dataclass(frozen=True, slots=True)
class Compute(_Computes):
    """An ATen operation."""


@dataclass(frozen=True, slots=True)
class Chunked(Compute):
    """A loop over rows, whose graph is its first argument; a region of its own once regions are outlined."""

    loop: RowLoop


@dataclass(frozen=True, slots=True)
class Call(_Computes):
    """A call of a region; its first arguments are the full parameters of `units`, in that order."""

    region: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Item(Operation):
    """One of several results of a line."""

    role = Role.VALUE

    index: int
    memory = _takes_no_memory


class _Waits(Operation):
    __slots__ = ()
    role = Role.WAIT
    functions = ("wait",)


# -- communication ----------------------------------------------------------------------------------------------------


class Communication(Operation):
    """Starts a collective over the data-parallel ranks along one axis, for the parameters of `unit`."""

    __slots__ = ()
    unit: str
    dtype: torch.dtype | None = None

    @property
    def averages(self) -> tuple[str, ...] | None:
        """The parameters whose gradients are averaged; None if the unit's sharded parameters are gathered."""
        return None

    @property
    def head(self) -> str:
        """The start of the text that ranks compare, before the unit and its messages."""
        return self.function

    @property
    def tail(self) -> str:
        """The end of the text that ranks compare."""
        return ""

    def over(self, layout: Layout) -> Axis:
        """Return the axis of the collective: the one that shards."""
        return layout.sharded

    def messages(self, layout: Layout) -> tuple[Message, ...]:
        """Return the messages of the collective."""
        return layout.unit(self.unit).sent(self.averages, self.dtype)

    def sent_dtype(self, message: Message) -> torch.dtype:
        """Return the dtype of a message in the text that ranks compare."""
        return message.dtype

    def payload_of(self, message: Message, layout: Layout) -> int:
        """Return the bytes of the tensors that a message moves, padding included; an all_reduce moves them twice."""
        return message.nbytes

    def payload(self, layout: Layout) -> int:
        """Return the bytes of the tensors that all messages move."""
        return sum(self.payload_of(message, layout) for message in self.messages(layout))

    def copied(self, layout: Layout) -> int:
        """Return the bytes of shards that are copied from the host first."""
        return 0

    def message_text(self, layout: Layout) -> str:
        """Return the text that ranks compare: `all_gather blocks.0 (a f32[8, 4], b f32[4]+c f32[4])`, `+` if packed."""
        texts = []
        for message in self.messages(layout):
            kind, owner = self.sent_dtype(message), "" if message.owner is None else f" owner {message.owner}"
            named = (f"{param.name} {TensorType.make(kind, param.shape)}" for param in message.params)
            texts.append("+".join(named) + owner)
        return f"{self.head} {self.unit} ({', '.join(texts)}){self.tail}"

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic:
        """Each primary shard is a separate message along the sharding axis."""
        axis, messages = self.over(layout), self.messages(layout)
        count = sum(layout.parts if axis is layout.sharded and message.is_sharded else 1 for message in messages)
        return Traffic(axis, self.payload(layout), count, self.copied(layout))


class _Outside(Communication):
    """A collective along the outer axis, which may send values compressed."""

    __slots__ = ()
    axis: str
    wire: torch.dtype | None

    @property
    def tail(self) -> str:
        """The axis, and the dtype that is sent."""
        return f" over {self.axis}" if self.wire is None else f" over {self.axis} in {dtype_text(self.wire)}"

    def over(self, layout: Layout) -> Axis:
        """Return the outer axis."""
        return layout.axis(self.axis)

    def messages(self, layout: Layout) -> tuple[Message, ...]:
        """Return the messages, each of the part of a unit that a rank has along the inner axis."""
        unit, inside = layout.unit(self.unit), layout.sharded.size
        return unit.sent(self.averages, self.dtype, inside=inside, wire=self.wire)


class Gathering(Communication):
    """Starts gathering a unit, or its secondary shards. `keep`: the result outlives the program, until a change."""

    __slots__ = ()
    role = Role.GATHER
    functions = ("all_gather",)
    keep: bool

    @property
    def head(self) -> str:
        """Marked if the result is kept."""
        return f"{self.function} keep" if self.keep else self.function

    def copied(self, layout: Layout) -> int:
        """Return the bytes of this rank's shards if they are in host memory."""
        nbytes = sum(message.nbytes for message in self.messages(layout))
        return nbytes // self.over(layout).size if layout.away else 0


@dataclass(frozen=True, slots=True)
class AllGather(Gathering):
    """Start gathering a unit. `keep`: the full copy outlives the program and is gathered again only after a change."""

    takes: ClassVar[tuple[tuple[type, ...], ...]] = ((Shards,),)

    unit: str
    keep: bool = False
    dtype: torch.dtype | None = None
    """Dtype to which shards are cast before they are sent; None to send them as they are."""
    at: ByteRange | None = None

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """0 in the arena, which is allocated once."""
        return 0 if self.at is not None else layout.gathered_bytes(self.unit)


@dataclass(frozen=True, slots=True)
class GatherOutside(_Outside, Gathering):
    """Start gathering the secondary shards of a unit over the ranks along `axis`, the outer one.

    `keep`: they outlive the program and are gathered again only after a change. In stages 1 and 2, full parameters are
    kept instead, and both gathers are repeated after a change.
    """

    takes = ((Shards,), (Group,))

    unit: str
    axis: str
    keep: bool = False
    dtype: torch.dtype | None = None
    """As for `AllGather`."""
    wire: torch.dtype | None = None
    """Dtype in which shards are sent, if not the gathered dtype: see `zcompile.ir.layout.Message`."""

    def sent_dtype(self, message: Message) -> torch.dtype:
        """Return the dtype in which shards are sent."""
        return message.wire or message.dtype

    def payload_of(self, message: Message, layout: Layout) -> int:
        """Return the bytes that all ranks send."""
        return message.gathered_bytes(self.over(layout).size)

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of the tensor that holds the secondary shards."""
        return secondary_bytes([message.nbytes for message in self.messages(layout)])

    def encoded_bytes(self, layout: Layout) -> int:
        """Return the bytes of compressed messages, which arrive in memory of their own."""
        encoded = (message for message in self.messages(layout) if message.wire is not None)
        return sum(self.payload_of(message, layout) for message in encoded)

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Bytes of the secondary shards and of compressed messages."""
        return data(node).nbytes + self.encoded_bytes(layout)


@dataclass(frozen=True, slots=True)
class WaitSecondary(_Waits):
    """Wait for the secondary shards of a unit; the result is one uint8 tensor."""

    takes = ((GatherOutside,),)

    unit: str

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Frees the compressed messages."""
        return data(node).nbytes - op_of(node.all_input_nodes[0], GatherOutside).encoded_bytes(layout)


@dataclass(frozen=True, slots=True)
class GatherInside(AllGather):
    """Start gathering a unit from its secondary shards."""

    takes = ((Shards,), (WaitSecondary,))
    copied = Communication.copied

    @property
    def tail(self) -> str:
        """The source of the gather, which is larger than the primary shards."""
        return " from secondary shards"


@dataclass(frozen=True, slots=True)
class GatherAhead(Gathering):
    """Start gathering a unit for the next step's forward, whose `AllGather` of it is then a no-op."""

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
        """0: the next step's gather counts the payload."""
        return 0

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """0 if the unit is gathered into the kept copy."""
        return 0 if self.keep else layout.gathered_bytes(self.unit)


@dataclass(frozen=True, slots=True)
class Sum(Operation):
    """Add further local gradients of a unit, or of some of its parameters, in place to the first ones."""

    role = Role.VALUE
    functions = ("add",)

    unit: str
    params: tuple[str, ...]
    dtype: torch.dtype | None = None
    """Dtype of the sum, if not the dtype of gradients; then the sum has memory of its own."""


SUMMED = (*GRADIENTS, Sum)
"""An argument that is a list of a unit's gradients, or their sum over micro-batches."""
Sum.takes = ((Shards,), SUMMED, GRADIENTS)


class Averaging(Communication):
    """Starts averaging gradients of `params`; with `scatter` each rank gets its part, else all of them."""

    __slots__ = ()
    role = Role.REDUCE
    functions = ("reduce_scatter", "all_reduce")
    params: tuple[str, ...]
    scatter: bool

    @property
    def function(self) -> str:
        """reduce_scatter if it scatters, else all_reduce."""
        return self.functions[0 if self.scatter else 1]

    @classmethod
    def meant_by(cls, function: str) -> dict[str, Any]:
        """Return whether the function scatters."""
        return {"scatter": function == cls.functions[0]}

    @property
    def averages(self) -> tuple[str, ...]:
        """The parameters that have a gradient."""
        return self.params

    def payload_of(self, message: Message, layout: Layout) -> int:
        """Return the bytes moved: twice the message's for an all_reduce."""
        return message.averaged_bytes(self.over(layout).size, scatters=self.scatter and message.is_sharded)


@dataclass(frozen=True, slots=True)
class Reduce(Averaging):
    """Start averaging gradients over the sharding ranks."""

    takes = ((Shards,), SUMMED)

    unit: str
    params: tuple[str, ...]
    scatter: bool
    dtype: torch.dtype | None = None
    """Dtype to which gradients are cast before they are sent; None to send them as they are."""
    bucket: int | None = None
    """Bytes of each piece in which gradients are copied and sent; None to copy them as a whole."""
    at: ByteRange | None = None

    @property
    def tail(self) -> str:
        """The size of pieces."""
        return f" by {self.bucket}" if self.bucket else ""

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Bytes of this rank's part of the averages; 0 without other ranks, as a gradient is then its own average."""
        if not self.scatter or layout.sharded.size == 1:
            return 0
        params = [layout.param(name) for name in self.params]
        return sum(param.padded_numel * param.reduce_dtype.itemsize // layout.sharded.size for param in params)


@dataclass(frozen=True, slots=True)
class WaitGather(_Waits):
    """Wait for the full parameters of a unit."""

    takes = ((AllGather,),)

    unit: str


@dataclass(frozen=True, slots=True)
class WaitReduce(_Waits):
    """Wait for the averaged gradients of `params`."""

    takes = ((Averaging,),)

    unit: str
    params: tuple[str, ...]
    added: bool = False
    """True for averages that are summed before the sum is moved to where their shards are, such as host memory."""

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Frees the inner averages once they have been scattered along the outer axis."""
        (started,) = node.all_input_nodes
        op = data(started).op
        return -op.inside_bytes(layout) if isinstance(op, ReduceOutside) else 0


@dataclass(frozen=True, slots=True)
class ReduceOutside(_Outside, Averaging):
    """Start averaging inner averages over the ranks along `axis`; with `scatter` each gets its primary shard's."""

    unit: str
    params: tuple[str, ...]
    axis: str
    scatter: bool
    dtype: torch.dtype | None = None
    """As for the preceding `Reduce`."""
    wire: torch.dtype | None = None
    """Dtype in which averages are sent, if not the dtype in which they are summed: see `zcompile.ir.layout.Message`."""

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Bytes of this rank's part of the averages; 0 if it works in place."""
        return self.inside_bytes(layout) // self.over(layout).size

    def inside_bytes(self, layout: Layout) -> int:
        """Return the bytes of the inner averages that it scatters, which its wait frees."""
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
        """Frees gathered parameters that are not in the arena."""
        gathers = (source for full in node.all_input_nodes for source in full.all_input_nodes)
        placed = any(isinstance(op := data(gather).op, AllGather) and op.at is not None for gather in gathers)
        return 0 if placed else -layout.gathered_bytes(self.unit)


# -- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SumAverages(Operation):
    """Add further averaged gradients of a unit, or of some of its parameters, in place to the first ones."""

    role = Role.VALUE
    functions = ("add",)

    unit: str
    params: tuple[str, ...]

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Frees the added gradients."""
        return -averages_bytes(node.all_input_nodes[2], layout)


AVERAGES = (WaitReduce, SumAverages)
"""An argument that is averaged gradients: of one micro-batch, or summed over several."""
SumAverages.takes = ((Shards,), AVERAGES, (WaitReduce,))
ReduceOutside.takes = ((Shards,), AVERAGES, (Group,))


@dataclass(frozen=True, slots=True)
class Update(Operation):
    """Run the optimizer on the averaged gradients of `params`, and free them."""

    role = Role.UPDATE
    functions = ("update",)
    takes = ((Shards,), AVERAGES)
    gives = False

    unit: str
    params: tuple[str, ...]

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Frees the averaged gradients."""
        return -averages_bytes(node.all_input_nodes[1], layout)


@dataclass(frozen=True, slots=True)
class Accumulate(Operation):
    """Accumulate local gradients of `params`, to be reduced with those of a later backward."""

    role = Role.VALUE
    functions = ("accumulate",)
    takes = ((Shards,), GRADIENTS)

    unit: str
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plus(Operation):
    """Add two gradients of a parameter of another pipeline stage, to sum them over micro-batches."""

    role = Role.VALUE
    functions = ("plus",)
    takes = (ANY, ANY)

    dtype: torch.dtype | None = None
    """Dtype of the sum, if not the dtype of gradients."""


@dataclass(frozen=True, slots=True)
class Copy(Operation):
    """Copy a value whose memory another value or a CUDA graph also uses, for a reader that must own it."""

    role = Role.VALUE
    functions = ("copy",)
    takes = (ANY,)

    strided: bool = False
    """True to keep the value's strides; False for a contiguous copy."""


@dataclass(frozen=True, slots=True)
class Write(Operation):
    """Write a new value to a buffer of the model."""

    role = Role.VALUE
    functions = ("write",)
    takes = ((Input,), ANY)
    gives = False


# -- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store(Operation):
    """Copy a saved activation onto the stack, so that its own memory can be freed."""

    role = Role.VALUE
    functions = ("store",)
    takes = (ANY, (Stack,))
    memory = _takes_no_memory


@dataclass(frozen=True, slots=True)
class Offload(Operation):
    """Start offloading an activation; the result, a scalar, represents it until it is fetched."""

    role = Role.MOVE
    functions = ("offload",)
    takes = (ANY, (OffloadStore, Group))


@dataclass(frozen=True, slots=True)
class Fetch(Operation):
    """Start fetching an offloaded activation."""

    role = Role.MOVE
    functions = ("fetch",)
    takes = (ANY, (OffloadStore, Group))

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic | None:
        """The ranks of a group gather their shards."""
        storage = data(node.all_input_nodes[1]).op
        return Traffic(layout.axis(storage.axis), data(node).nbytes) if isinstance(storage, Group) else None


@dataclass(frozen=True, slots=True)
class WaitFetch(_Waits):
    """Wait for a fetched activation."""

    takes = ((Fetch,),)


# -- between pipeline stages ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send(Operation):
    """Start sending a value to the rank with coordinate `to` along `axis`. The value is held until the wait."""

    role = Role.SEND
    functions = ("send",)
    takes = (ANY, (Group,))

    axis: str
    to: int = -1
    message: str = ""
    """The micro-batch, and the value's name in the traced step."""
    strides: tuple[int, ...] | None = None
    """Strides of the received value, in elements; None if it is contiguous."""

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic:
        """The whole value goes to one rank."""
        type_ = data(node.all_input_nodes[0]).type
        return Traffic(layout.axis(self.axis), type_.nbytes if type_ else 0, to_one=True)


@dataclass(frozen=True, slots=True)
class Receive(Operation):
    """Start receiving a tensor, of the type given in the line, from the rank with coordinate `source` along `axis`."""

    role = Role.RECEIVE
    functions = ("recv",)
    takes = ((Group,), (str,))

    axis: str
    source: int = -1
    message: str = ""
    """As for the `Send`."""
    strides: tuple[int, ...] | None = None
    """Strides of the value, in elements; None if it is contiguous."""


@dataclass(frozen=True, slots=True)
class WaitReceive(_Waits):
    """Wait for a value from another rank."""

    takes = ((Receive,),)


@dataclass(frozen=True, slots=True)
class WaitSend(_Waits):
    """Wait for a send: afterwards the value's memory may be reused."""

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
"""Operations that take a list of gradients and empty it."""


def _stand_in(name: str) -> Callable[..., NoReturn]:
    """Return the function that represents the runtime's function `name` in a graph."""

    def only_a_name(*_: Any, **__: Any) -> NoReturn:
        message = f"{name} stands for an operation of the runtime; lower the program to run it"
        raise TypeError(message)

    only_a_name.__name__ = only_a_name.__qualname__ = name
    return only_a_name


region = _stand_in("region")
"""The target of calls of regions: its first argument is the region's name."""
chunked = _stand_in("chunked")
"""The target of loops over rows: see `Chunked`."""
FUNCTIONS: Mapping[str, Callable[..., NoReturn]] = {
    name: _stand_in(name) for name in dict.fromkeys(name for kind in _LINES for name in kind.functions)
}
"""The functions that represent the runtime's functions in a graph, by name."""
NAMES = frozenset({*FUNCTIONS, "torch", "unbox", "aten", "ops", "box", "graph", "chunked"})
"""Reserved names in a printed program, which no value may have."""


def operation(name: str, given: Sequence[Any], keywords: Mapping[str, Any], layout: Layout) -> Operation:
    """Return the operation of a call of the runtime's function `name`.

    Args:
        name: The printed name of the function.
        given: Its positional arguments, with each value replaced by the operation that produces it.
        keywords: Its keyword arguments.
        layout: The layout of the program.
    """
    kinds = [kind for kind in _LINES if name in kind.functions]
    kind = next((kind for kind in kinds if takes(kind, tuple(given))), kinds[0])
    unit: str = getattr(given[0], "unit", "") if given else ""
    values: dict[str, Any] = {"unit": unit, "params": (), **kind.meant_by(name)}
    # The first summand has all parameters of a sum; further ones may have fewer.
    values |= {name: getattr(arg, name) for arg in reversed(given) for name in ("params", "axis") if hasattr(arg, name)}
    if kind in GRADIENT_LISTS and not isinstance(given[1], Sum):
        named = zip(layout.unit(unit).params, given[1], strict=True)
        values["params"] = tuple(param.name for param, gradient in named if gradient is not None)
    values |= {option: value for option, value in keywords.items() if option in options_of(kind)}
    return kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})  # type: ignore[arg-type]


def reductions_of(averages: fx.Node) -> list[fx.Node]:
    """Return the reductions that computed averages, one per axis, last first; for a sum, those of its first summand."""
    if isinstance(data(averages).op, SumAverages):
        return reductions_of(averages.all_input_nodes[1])
    (last,) = averages.all_input_nodes
    return [last, *reductions_of(last.all_input_nodes[1])] if isinstance(data(last).op, ReduceOutside) else [last]


def averages_bytes(averages: fx.Node, layout: Layout) -> int:
    """Return the bytes of averaged gradients that their reductions allocated; for a sum, of its first summand."""
    while isinstance(data(averages).op, SumAverages):
        averages = averages.all_input_nodes[1]
    return sum(data(node).op.memory(node, layout) for node in (averages, *reductions_of(averages)))


def wait_of(started: fx.Node) -> fx.Node:
    """Return the wait for the work that a line starts."""
    (wait,) = [user for user in started.users if data(user).op.role is Role.WAIT]
    return wait


def called(value: fx.Node) -> fx.Node:
    """Return the line that computes a value: itself, or the call if the value is an item."""
    return value.all_input_nodes[0] if isinstance(data(value).op, Item) else value


def items_of(node: fx.Node) -> list[fx.Node]:
    """Return the items of a call with several results, in the order in which they were added."""
    return [user for user in node.users if isinstance(data(user).op, Item)]


def is_part(node: fx.Node) -> bool:
    """Return True for an item that the line of its call names; items of an item that is a tuple have own lines."""
    made = called(node)
    return node.op == "call_function" and made is not node and called(made) is made


def values_of(node: fx.Node) -> list[fx.Node]:
    """Return the values that a line computes: its items if it has several results, else itself."""
    return items_of(node) or [node]
