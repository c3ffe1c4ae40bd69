"""What an operation of the outer program is, and what passes know of a node: the frame of the table in `ops`."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from enum import Enum, StrEnum, auto
from typing import Any, ClassVar, TypeVar

from torch import fx

from zcompile.ir.axis import Axis
from zcompile.ir.layout import Layout
from zcompile.ir.tensor_type import TensorType


class Phase(StrEnum):
    """The two halves of a step, or a whole step of several micro-batches, whose halves alternate."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Role(Enum):
    """What an operation does to time and memory; cost, simulator, drawing and report go by it."""

    PLACEHOLDER = auto()
    COMPUTE = auto()
    VALUE = auto()
    """Gives a value at once, out of what is there."""
    GATHER = auto()
    """Starts what makes parameters full."""
    REDUCE = auto()
    """Starts what averages gradients."""
    MOVE = auto()
    """Starts what takes an activation away, or brings it back."""
    SEND = auto()
    """Starts sending a value to another pipeline stage."""
    RECEIVE = auto()
    """Starts receiving one."""
    WAIT = auto()
    """Ends when what it takes has arrived."""
    FREE = auto()
    """Gives back full parameters."""
    UPDATE = auto()
    """Steps the optimizer, and frees the gradients."""
    RESULTS = auto()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a line sends, over the ranks of one axis."""

    axis: Axis
    payload: int
    """Bytes of the tensors that are moved, padding included; an all_reduce moves them twice."""
    messages: int = 1
    copied: int = 0
    """Bytes that are copied from the host before they are sent."""
    to_one: bool = False
    """True for what goes from one rank of the axis to one other."""

    @property
    def sent(self) -> int:
        """Bytes that this rank sends: (N-1)/N of the payload, or all of what goes to one other."""
        if self.to_one:
            return self.payload
        return self.payload * (self.axis.size - 1) // self.axis.size


class Operation:
    """One kind of lines or placeholders. A subclass is a row of the table: see `zcompile.ir.ops`."""

    __slots__ = ()

    role: ClassVar[Role]
    functions: ClassVar[tuple[str, ...]] = ()
    """The runtime's functions that its lines call. Fields that have a default are what is given to them by name."""
    takes: ClassVar[tuple[tuple[type, ...], ...] | None] = None
    """For each argument of its lines the kinds of operations that may give it; None for what is checked elsewhere."""
    gives: ClassVar[bool] = True
    """False if the result of its lines has no name."""
    inert: ClassVar[bool] = False
    """True if a program computes the same without its lines."""

    @property
    def function(self) -> str:
        """The one of `functions` that a line of this operation calls."""
        return self.functions[0]

    @classmethod
    def meant_by(cls, function: str) -> dict[str, Any]:
        """The fields that differ by which of `functions` a line calls."""
        return {}

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Bytes gained when `node`, which is of this operation, runs; negative if they are freed."""
        return data(node).nbytes

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic | None:
        """What `node`, which is of this operation, sends."""
        return None


ANY = (Operation,)
"""An argument that any operation may give."""
GRADIENTS = (list, tuple)
"""An argument that lists a gradient, or None, for each parameter of the unit."""


def options_of(kind: type[Operation]) -> dict[str, Any]:
    """What lines of a kind may be given by name, with the defaults."""
    return {one.name: one.default for one in fields(kind) if one.default is not MISSING}  # type: ignore[arg-type]


def keywords_of(op: Operation) -> dict[str, Any]:
    """What a line of `op` is given by name: what is not as usual."""
    given = ((name, getattr(op, name), default) for name, default in options_of(type(op)).items())
    return {name: value for name, value, default in given if value != default}


def takes(kind: type[Operation], given: tuple[Any, ...]) -> bool:
    """True if lines of `kind` take these arguments: of a value the operation that gives it."""
    wanted = kind.takes or ()
    return len(wanted) == len(given) and all(isinstance(one, kinds) for one, kinds in zip(given, wanted, strict=True))


@dataclass(frozen=True, slots=True)
class Data:
    """All that passes know of a node."""

    op: Operation
    phase: Phase = Phase.FORWARD
    type: TensorType | None = None
    source: str = ""
    """Path of the module it comes from; for communication, of the unit."""
    unit: str = ""
    """Of compute, the unit whose region it belongs to, once assigned; empty for glue between units. Of communication it
    is the operation that knows the unit: `data(node).op.unit`."""
    view: bool = False
    """True if the value shares the memory of another one."""
    replicated: str = ""
    """Where every rank of the model-parallel mesh is known to have the same value: a digest of how it comes about."""
    storage: int = 0
    """Bytes of the memory that the value keeps alive, where that is not what it shows; printed behind the type."""
    deferred: bool = False
    """True for what a divided backward leaves for later: gradients of weights, for which no other stage waits."""
    action: str = ""
    """The action of a pipeline schedule that it is a part of, as that is printed: see `zcompile.ir.actions`."""

    @property
    def nbytes(self) -> int:
        """Bytes of new memory that the value takes."""
        return (self.storage or self.type.nbytes) if self.type and not self.view else 0


_KEY = "zcompile"


def data(node: fx.Node) -> Data:
    """The one reader of a node's data."""
    result: Data = node.meta[_KEY]
    return result


def has_data(node: fx.Node) -> bool:
    """False for a node that one of torch's own passes has put in."""
    return _KEY in node.meta


T = TypeVar("T", bound=Operation)


def op_of(node: fx.Node, kind: type[T]) -> T:
    """The operation of a node known to be of `kind`."""
    result = data(node).op
    assert isinstance(result, kind), f"{node.name} is {result}, not {kind.__name__}"
    return result


def set_data(node: fx.Node, value: Data) -> fx.Node:
    """The one writer of a node's data; returns the node."""
    node.meta[_KEY] = value
    return node


def given_to(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, in place of each value the operation that gives it."""
    return tuple(data(arg).op if isinstance(arg, fx.Node) else arg for arg in node.args)


def line_of(node: fx.Node) -> str:
    """The innermost line of the user's code that it comes from, `file.py:12`; empty where torch has noted none."""
    lines = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{lines[-1][0]}:{lines[-1][1]}" if lines else ""
