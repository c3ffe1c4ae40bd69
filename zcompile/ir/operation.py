"""Base classes of the operations in `zcompile.ir.ops`, and the data that passes attach to nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    """What an operation does to time and memory; used by cost, simulator, drawings and reports."""

    PLACEHOLDER = auto()
    COMPUTE = auto()
    VALUE = auto()
    """Returns a value without a region's compute or a wait."""
    GATHER = auto()
    """Starts gathering parameters."""
    REDUCE = auto()
    """Starts averaging gradients."""
    MOVE = auto()
    """Starts offloading an activation, or fetching it back."""
    SEND = auto()
    """Starts sending a value to another pipeline stage."""
    RECEIVE = auto()
    """Starts receiving a value from another pipeline stage."""
    WAIT = auto()
    """Waits until asynchronous work has finished."""
    FREE = auto()
    """Frees full parameters."""
    UPDATE = auto()
    """Steps the optimizer, and frees the gradients."""
    RESULTS = auto()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a line sends among the ranks along one axis."""

    axis: Axis
    payload: int
    """Bytes of the tensors that are moved, padding included; an all_reduce moves them twice."""
    messages: int = 1
    copied: int = 0
    """Bytes that are copied from the host before they are sent."""
    to_one: bool = False
    """True for a message from one rank of the axis to another."""

    @property
    def sent(self) -> int:
        """Bytes that this rank sends: (N-1)/N of the payload, or all of it if it goes to one rank."""
        if self.to_one:
            return self.payload
        return self.payload * (self.axis.size - 1) // self.axis.size


class Operation:
    """A kind of line or placeholder; each subclass is a row of the table in `zcompile.ir.ops`."""

    __slots__ = ()

    role: ClassVar[Role]
    functions: ClassVar[tuple[str, ...]] = ()
    """The runtime functions that its lines call. Fields with a default are their keyword arguments."""
    takes: ClassVar[tuple[tuple[type, ...], ...] | None] = None
    """For each argument of its lines, the types of operations that may produce it; None if checked elsewhere."""
    gives: ClassVar[bool] = True
    """False if its lines have no named result."""
    inert: ClassVar[bool] = False
    """True if a program computes the same without its lines."""

    @property
    def function(self) -> str:
        """The function in `functions` that a line of this operation calls."""
        return self.functions[0]

    @classmethod
    def meant_by(cls, function: str) -> dict[str, Any]:
        """Return the fields that follow from which of `functions` a line calls."""
        return {}

    def memory(self, node: fx.Node, layout: Layout) -> int:
        """Return the bytes that `node`, a line of this operation, allocates; negative if it frees memory."""
        return data(node).nbytes

    def traffic(self, node: fx.Node, layout: Layout) -> Traffic | None:
        """Return what `node`, a line of this operation, sends; None if it sends nothing."""
        return None


ANY = (Operation,)
"""An argument that any operation may produce."""
GRADIENTS = (list, tuple)
"""An argument that is a list of a gradient, or None, for each parameter of the unit."""


def options_of(kind: type[Operation]) -> dict[str, Any]:
    """Return the keyword arguments that lines of `kind` may have, with their defaults."""
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}  # type: ignore[arg-type]


def keywords_of(op: Operation) -> dict[str, Any]:
    """Return the keyword arguments of a line of `op`: the options that differ from their defaults."""
    given = ((name, getattr(op, name), default) for name, default in options_of(type(op)).items())
    return {name: value for name, value, default in given if value != default}


def takes(kind: type[Operation], given: tuple[Any, ...]) -> bool:
    """Return True if lines of `kind` take these arguments, in which operations stand for the values they produce."""
    wanted = kind.takes or ()
    return len(wanted) == len(given) and all(isinstance(arg, kinds) for arg, kinds in zip(given, wanted, strict=True))


@dataclass(frozen=True, slots=True)
class Data:
    """All that passes know about a node."""

    op: Operation
    phase: Phase = Phase.FORWARD
    type: TensorType | None = None
    source: str = ""
    """Path of the module it comes from; for communication, of the unit."""
    unit: str = ""
    """For compute, the unit whose region it belongs to, once assigned; empty for glue between units. For communication,
    see `data(node).op.unit` instead."""
    view: bool = False
    """True if the value shares the memory of another value."""
    replicated: str = ""
    """If all ranks of the model-parallel mesh are known to have the same value, a digest of how it is computed."""
    storage: int = 0
    """Bytes of memory that the value keeps alive, if not the bytes of its elements; printed after the type."""
    deferred: bool = False
    """True for the deferred part of a divided backward: gradients of weights, which no other stage waits for."""
    action: str = ""
    """The action of a pipeline schedule that it is part of, as printed: see `zcompile.ir.actions`."""

    @property
    def nbytes(self) -> int:
        """Bytes of new memory that the value takes."""
        return (self.storage or self.type.nbytes) if self.type and not self.view else 0


_KEY = "zcompile"


def data(node: fx.Node) -> Data:
    """Return a node's data; nothing else reads it."""
    result: Data = node.meta[_KEY]
    return result


def has_data(node: fx.Node) -> bool:
    """Return False for a node that a pass of torch inserted."""
    return _KEY in node.meta


T = TypeVar("T", bound=Operation)


def op_of(node: fx.Node, kind: type[T]) -> T:
    """Return the operation of a node known to be of `kind`."""
    result = data(node).op
    assert isinstance(result, kind), f"{node.name} is {result}, not {kind.__name__}"
    return result


def set_data(node: fx.Node, value: Data) -> fx.Node:
    """Set a node's data and return the node; nothing else writes it."""
    node.meta[_KEY] = value
    return node


def given_to(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments, with each value replaced by the operation that produces it."""
    return tuple(data(arg).op if isinstance(arg, fx.Node) else arg for arg in node.args)


def line_of(node: fx.Node) -> str:
    """Return the innermost line of user code that a node comes from, as `file.py:12`; "" if torch recorded none."""
    lines = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{lines[-1][0]}:{lines[-1][1]}" if lines else ""


def dependents(values: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `values` and all that is computed from them."""
    found = {*values}
    waiting = [*found]
    while waiting:
        users = waiting.pop().users.keys() - found
        found |= users
        waiting += users
    return found
