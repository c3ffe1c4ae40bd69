"""The operations of the outer program: names in the graph here, code in the runtime.

An outer program is a list of calls of these functions and of regions. They are never run from here: the printed
program is executed with the functions of `zcompile.runtime.executor` under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import torch
from torch import fx

from zcompile.ir.tensor_type import TensorType

Place = tuple[int, int]
"""The bytes [start, stop) of the arena that a line has for what it gathers, or copies to be sent."""


class Phase(StrEnum):
    """The two halves of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(StrEnum):
    """What an input of a program is."""

    DATA = "data"
    TANGENT = "tangent"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Input:
    """A placeholder that the caller fills; `index` is its place among the caller's arguments of this kind."""

    kind: Kind
    index: int
    mutated: bool = False
    """True if the forward writes to it: once it has run, the value that it read is gone."""
    held: str = ""
    """What it is if it is no argument of the call that ranks may be taken to have alike: a buffer's name, or `?`."""
    result: int | None = None
    """Of a tangent: the number of the forward's result that it is the gradient of, where that is known."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A placeholder for a full parameter, before regions are outlined."""

    name: str


@dataclass(frozen=True, slots=True)
class Shards:
    """A placeholder for what this rank keeps of a unit."""

    unit: str


@dataclass(frozen=True, slots=True)
class Arena:
    """A placeholder for memory that is kept from step to step, of which a program's lines are given their places."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A placeholder for memory that is kept from step to step, in which checkpoints lie one behind the other."""


@dataclass(frozen=True, slots=True)
class Away:
    """A placeholder for where activations are kept that the device has no memory for."""


@dataclass(frozen=True, slots=True)
class Peers:
    """A placeholder for `size` ranks that have the same activations, of which each keeps a part."""

    size: int


@dataclass(frozen=True, slots=True)
class Compute:
    """An ATen operation."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a region; its first arguments are the full parameters of `units`, in that order."""

    region: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One of several results."""

    index: int


@dataclass(frozen=True, slots=True)
class AllGather:
    """Start gathering a unit. `keep`: the full copy outlives the program and is gathered again only after a change."""

    unit: str
    keep: bool = False
    dtype: torch.dtype | None = None
    """What shards are cast to before they are sent; None: sent as they are."""
    at: Place | None = None


@dataclass(frozen=True, slots=True)
class WaitGather:
    """The full parameters of a unit, once they have arrived."""

    unit: str


@dataclass(frozen=True, slots=True)
class Release:
    """Free the full parameters of a unit."""

    unit: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start averaging the gradients of `params` over the ranks; `scatter`: each rank gets its shard, else all."""

    unit: str
    params: tuple[str, ...]
    scatter: bool
    dtype: torch.dtype | None = None
    """What gradients are cast to before they are sent; None: sent as they are."""
    bucket: int | None = None
    """Bytes of a piece of what is copied to be sent; None: it is copied as a whole."""
    at: Place | None = None


@dataclass(frozen=True, slots=True)
class WaitReduce:
    """The averaged gradients of `params`, once they have arrived."""

    unit: str
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Let the optimizer use the averaged gradients of `params`, and free them."""

    unit: str
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GatherAhead:
    """Start gathering a unit for the next step's forward, whose `AllGather` of it then starts nothing."""

    unit: str
    keep: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Hold this rank's own gradients of `params` back: they are reduced with those of a later backward."""

    unit: str
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A gradient copied, because its memory belongs to another value too and the reduction must own it."""


@dataclass(frozen=True, slots=True)
class Store:
    """A checkpoint copied onto the stack, so that its own memory is free again."""


@dataclass(frozen=True, slots=True)
class Stash:
    """What stands for an activation from where it is on its way out, until it is fetched."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start bringing an activation back."""


@dataclass(frozen=True, slots=True)
class WaitFetch:
    """The activation, once it is back."""


@dataclass(frozen=True, slots=True)
class Results:
    """The end of a program: see `zcompile.ir.program_graph.ResultsView`."""


Op = (
    Input
    | Parameter
    | Shards
    | Arena
    | Stack
    | Away
    | Peers
    | Compute
    | Call
    | Item
    | AllGather
    | WaitGather
    | Release
    | Reduce
    | WaitReduce
    | Update
    | GatherAhead
    | Accumulate
    | Copy
    | Store
    | Stash
    | Fetch
    | WaitFetch
    | Results
)


@dataclass(frozen=True, slots=True)
class Data:
    """All that passes know of a node."""

    op: Op
    phase: Phase = Phase.FORWARD
    type: TensorType | None = None
    source: str = ""
    """Path of the module it comes from; for communication, of the unit."""
    unit: str = ""
    """The unit whose region it belongs to, once assigned; empty for glue between units."""
    view: bool = False
    """True if the value shares the memory of another one."""
    replicated: str = ""
    """Where every rank of the model-parallel mesh is known to have the same value: a digest of how it comes about."""
    storage: int = 0
    """Bytes of the memory that the value keeps alive, where that is not what it shows; printed behind the type."""

    @property
    def nbytes(self) -> int:
        """Bytes of new memory that the value takes."""
        return (self.storage or self.type.nbytes) if self.type and not self.view else 0


_KEY = "zcompile"


def data(node: fx.Node) -> Data:
    """The one reader of a node's data."""
    found: Data = node.meta[_KEY]
    return found


def has_data(node: fx.Node) -> bool:
    """False for a node that one of torch's own passes has put in."""
    return _KEY in node.meta


T = TypeVar("T", bound=Op)


def op_of(node: fx.Node, kind: type[T]) -> T:
    """The operation of a node known to be of `kind`."""
    found = data(node).op
    assert isinstance(found, kind), f"{node.name} is {found}, not {kind.__name__}"
    return found


def set_data(node: fx.Node, value: Data) -> fx.Node:
    """The one writer of a node's data; returns the node."""
    node.meta[_KEY] = value
    return node


def _only_a_name(name: str) -> NoReturn:
    message = f"{name} stands for an operation of the runtime; lower the program to run it"
    raise TypeError(message)


def region(name: str, *args: Any) -> NoReturn:
    """Call the region `name`; printed as `name(*args)`."""
    _only_a_name(name)


def all_gather(unit: Any, *, keep: bool = False, dtype: torch.dtype | None = None, at: Any = None) -> NoReturn:
    """Start gathering the full parameters of a unit, cast to `dtype`, into the memory `at` if given."""
    _only_a_name("all_gather")


def reduce_scatter(
    unit: Any,
    grads: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    bucket: int | None = None,
    at: Any = None,
) -> NoReturn:
    """Start averaging the gradients of a unit, one or None for each of its parameters; each rank gets its shard.

    What has to be copied to be sent is copied into the memory `at` if given.
    """
    _only_a_name("reduce_scatter")


def all_reduce(unit: Any, grads: Sequence[Any], *, dtype: torch.dtype | None = None) -> NoReturn:
    """Start averaging the gradients of a unit, one or None for each of its parameters; each rank gets all."""
    _only_a_name("all_reduce")


def update(unit: Any, grads: Any) -> NoReturn:
    """Step the optimizer for the parameters of a unit with their averaged gradients, which are freed."""
    _only_a_name("update")


def gather_ahead(unit: Any, *, keep: bool = False, dtype: torch.dtype | None = None) -> NoReturn:
    """Start gathering a unit for the next step."""
    _only_a_name("gather_ahead")


def accumulate(unit: Any, grads: Sequence[Any]) -> NoReturn:
    """Hold gradients back; a later reduction of the same parameters adds them to its own."""
    _only_a_name("accumulate")


def copy(value: Any) -> NoReturn:
    """A copy of a tensor, in memory of its own."""
    _only_a_name("copy")


def store(value: Any, stack: Any) -> NoReturn:
    """A copy of a tensor, on top of a stack."""
    _only_a_name("store")


def stash(value: Any, away: Any) -> NoReturn:
    """Start moving an activation out of the device's memory; gives what stands for it."""
    _only_a_name("stash")


def fetch(stashed: Any, away: Any) -> NoReturn:
    """Start bringing an activation back."""
    _only_a_name("fetch")


def wait(started: Any) -> NoReturn:
    """Wait for a gather (the full parameters), a reduction (the averaged gradients) or a fetch (the activation)."""
    _only_a_name("wait")


def release(full: Any) -> NoReturn:
    """Free full parameters."""
    _only_a_name("release")


NAMES = frozenset(
    {
        "torch",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "update",
        "gather_ahead",
        "accumulate",
        "wait",
        "release",
        "copy",
        "store",
        "stash",
        "fetch",
        "unbox",
        "aten",
        "ops",
        "box",
    }
)
"""Names with a meaning in a printed program; no value is called so."""


def items_of(node: fx.Node) -> list[fx.Node]:
    """The results of a call that has several, in the order in which they are used first."""
    return [user for user in node.users if isinstance(data(user).op, Item)]


def values_of(node: fx.Node) -> list[fx.Node]:
    """The values that an operation gives: its results where it has several, else itself."""
    return items_of(node) or [node]
