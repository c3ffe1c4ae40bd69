"""How parameters are divided: stages, parameters, units, and the layout that holds them.

Vocabulary: a *unit* is the parameters gathered and released together; a *shard* is what this rank keeps of a
parameter; *full* is the whole parameter; *padded* is rounded up for the world.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import torch

from zcompile.errors import ModelError
from zcompile.ir.axis import Axis, AxisKind, axes_of
from zcompile.ir.packing import aligned

SMALL_BYTES = 64 * 1024
"""A parameter of at most this many bytes travels packed with its neighbours: a copy costs less than a message."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One ZeRO stage as three choices (Rajbhandari et al., "ZeRO", SC 2020, section 5): what is sharded."""

    number: int
    optimizer_sharded: bool
    gradients_sharded: bool
    parameters_sharded: bool

    @property
    def volume(self) -> int:
        """Communication in units of Ψ elements times (N-1)/N, as each rank sends in one step (section 7)."""
        return 3 if self.parameters_sharded else 2


STAGES = (
    Stage(0, optimizer_sharded=False, gradients_sharded=False, parameters_sharded=False),
    Stage(1, optimizer_sharded=True, gradients_sharded=False, parameters_sharded=False),
    Stage(2, optimizer_sharded=True, gradients_sharded=True, parameters_sharded=False),
    Stage(3, optimizer_sharded=True, gradients_sharded=True, parameters_sharded=True),
)


class Hybrid(StrEnum):
    """What two axes divide, where one of them repeats what the other one shards.

    A *primary shard* is what a rank keeps of parameters and their optimizer state. A *secondary shard* is what a rank
    has of them while they are gathered inside only: the primary shards of the ranks that are at its place outside.
    """

    HSDP = "hsdp"
    """All is sharded inside and repeated outside (MiCS, Zhang et al. 2022): there are no secondary shards."""
    HFSDP = "hfsdp"
    """All is sharded over both axes; secondary shards are kept until parameters change."""
    HPZ = "hpz"
    """The same, with secondary shards from a forward to its backward alone (ZeRO++, Wang et al. 2023, section 3.2)."""


@dataclass(frozen=True)
class Param:
    """One parameter and the number of shards it is split into on dim 0 (0: every rank keeps it whole).

    Of an owned one all rows are the shard of its owner, and the other ranks' shards are empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the shard, of the optimizer's state and of the gradient that the optimizer gets."""
    trainable: bool = True
    shards: int = 0
    compute_dtype: torch.dtype | None = None
    """In which it is gathered and computed with; None: in its own."""
    reduction_dtype: torch.dtype | None = None
    """In which its gradient is averaged; None: in that of the full parameter."""
    owner: int | None = None
    """The rank, of those that shard, that keeps all of it; None: its rows are divided among them."""
    outer_dtype: torch.dtype | None = None
    """In which averages of its gradient travel between replicas; None: in that of the average."""
    outer_gather_dtype: torch.dtype | None = None
    """In which its shards travel outside, where both axes divide it; None: in that of the full parameter."""

    @cached_property
    def full_dtype(self) -> torch.dtype:
        return self.compute_dtype or self.dtype

    @cached_property
    def reduce_dtype(self) -> torch.dtype:
        return self.reduction_dtype or self.full_dtype

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """In which gradients are summed over micro-batches, if not in their own: in that of the average, if wider."""
        return self.reduce_dtype if self.reduce_dtype.itemsize > self.full_dtype.itemsize else None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def rows(self) -> int:
        """Rows of dim 0 in one padded shard, as `torch.chunk` and `Shard(0)` divide: the tail is short."""
        height = self.shape[0] if self.shape else 1
        return height if not self.shards or self.owner is not None else -(-height // self.shards)

    @cached_property
    def row_numel(self) -> int:
        """Elements of one row of dim 0."""
        return math.prod(self.shape[1:])

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one padded shard; of an owned parameter, those of a shard on average."""
        return self.rows * self.row_numel if self.owner is None else -(-self.numel // self.shards)

    def kept_numel(self, rank: int) -> int:
        """Elements of what `rank` keeps, padding included."""
        return self.shard_numel if self.owner is None else self.numel if rank == self.owner else 0

    @cached_property
    def padded_numel(self) -> int:
        return self.numel if self.owner is not None else self.shard_numel * max(self.shards, 1)

    def gathered_in(self, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype | None]:
        """The dtype that a gather gives which casts to `dtype`, and in which shards travel outside."""
        return self.full_dtype if dtype is self.compute_dtype else self.dtype, self.outer_gather_dtype

    def averaged_in(self, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype | None]:
        """The same of gradients that are averaged."""
        return self.reduce_dtype if dtype is self.reduction_dtype else self.full_dtype, self.outer_dtype

    def numel_of(self, inside: int) -> int:
        """Elements of what a rank has where `inside` ranks divide it, padding included."""
        return -(-self.padded_numel // inside) if self.shards else self.numel

    @property
    def padded_bytes(self) -> int:
        """Bytes of the full parameter, padded for the world."""
        return self.padded_numel * self.full_dtype.itemsize

    def gathered_as(self, wire: torch.dtype | None) -> Param:
        """This parameter with shards that travel outside as `wire`, where that is fewer bytes: not if they are tiny."""
        usual = self.shard_numel * self.full_dtype.itemsize
        fewer = (
            wire is not None and self.full_dtype.is_floating_point and shard_wire_bytes(self.shard_numel, wire) < usual
        )
        return replace(self, outer_gather_dtype=wire if fewer and self.shards else None)

    @property
    def is_small(self) -> bool:
        """True for a parameter of at most SMALL_BYTES: biases, norms."""
        return self.nbytes <= SMALL_BYTES

    def shard_rows(self, rank: int) -> tuple[int, int]:
        """The rows [start, stop) of dim 0 that `rank` keeps, padding left out."""
        height = self.shape[0] if self.shape else 1
        if self.owner is not None:
            return 0, height if rank == self.owner else 0
        index = rank if self.shards else 0
        return min(index * self.rows, height), min((index + 1) * self.rows, height)


@dataclass(frozen=True)
class Message:
    """Parameters of a unit that travel together along one axis: what is sent of them, and how.

    Attributes:
        places, params: The parameters, and where they stand in the unit.
        dtype: In which they are gathered, or their gradients averaged.
        numel: Elements that are gathered or averaged, padding included.
        wire: In which they travel, if that is fewer bytes: see `part_numel`.
    """

    places: tuple[int, ...]
    params: tuple[Param, ...]
    dtype: torch.dtype
    numel: int
    wire: torch.dtype | None = None

    @cached_property
    def owner(self) -> int | None:
        return self.params[0].owner

    @cached_property
    def is_sharded(self) -> bool:
        return bool(self.params[0].shards)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of what is gathered or averaged."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def shard_numels(self) -> list[int]:
        return [param.shard_numel for param in self.params]

    def parts(self, rank: int | None) -> list[tuple[Param, slice, torch.Size]]:
        """Of what has arrived each parameter's elements, and their shape: the rows of `rank`; for None, all of them."""
        if rank not in self._parts:
            found, start = [], 0
            for param in self.params:
                first, end = param.shard_rows(rank) if rank is not None else (0, param.shape[0] if param.shape else 1)
                shape = torch.Size((end - first, *param.shape[1:])) if rank is not None else torch.Size(param.shape)
                found.append((param, slice(start, start + (end - first) * param.row_numel), shape))
                start += param.numel if rank is None else param.kept_numel(rank)
            self._parts[rank] = found
        return self._parts[rank]

    @cached_property
    def _parts(self) -> dict[int | None, list[tuple[Param, slice, torch.Size]]]:
        return {}

    def gathered_bytes(self, ranks: int) -> int:
        """Bytes that arrive where `ranks` ranks send each other their shards."""
        if self.wire is None:
            return self.nbytes
        return ranks * sum(shard_wire_bytes(numel, self.wire) for numel in self.shard_numels)

    def averaged_bytes(self, ranks: int, *, scatters: bool) -> int:
        """Bytes that averaging over `ranks` ranks moves: twice those of what every rank gets whole."""
        if self.wire is None:
            return (1 if scatters else 2) * self.nbytes
        if scatters:
            return ranks * wire_bytes(padded_to_blocks(self.numel // ranks), self.wire)
        return average_payload(self.numel, ranks, self.wire)


@dataclass(frozen=True)
class Unit:
    """Parameters gathered and released together.

    `messages` says which of them travel in one collective: indices into `params`. A message of one parameter goes
    straight from and into contiguous memory; a message of several is packed.
    """

    name: str
    params: tuple[Param, ...]
    modules: tuple[str, ...] = ()
    messages: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            object.__setattr__(self, "messages", tuple((index,) for index in range(len(self.params))))

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.params)

    @property
    def is_sharded(self) -> bool:
        """False where every rank has all parameters of this unit whole."""
        return any(param.shards for param in self.params)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What parameters of this unit are cast to when it is gathered; None if none of them is."""
        return next((param.compute_dtype for param in self.params if param.compute_dtype), None)

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """What gradients of this unit are cast to when they are reduced; None if none of them is."""
        return next((param.reduction_dtype for param in self.params if param.reduction_dtype), None)

    @property
    def outer_dtype(self) -> torch.dtype | None:
        """In which averages of this unit travel between replicas; None: in that of the averages."""
        return next((param.outer_dtype for param in self.params if param.outer_dtype), None)

    @property
    def outer_gather_dtype(self) -> torch.dtype | None:
        """In which shards of this unit travel outside, but for those that do not; None: in that of full parameters."""
        return next((param.outer_gather_dtype for param in self.params if param.outer_gather_dtype), None)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    def index(self, name: str) -> int:
        return self._places[name]

    def sent(
        self,
        names: tuple[str, ...] | None,
        dtype: torch.dtype | None,
        *,
        inside: int = 1,
        wire: torch.dtype | None = None,
        packed: bool = True,
    ) -> tuple[Message, ...]:
        """What travels together where the gradients of `names` are averaged; None: where the unit is gathered.

        By a line that casts to `dtype` what is computed with, or averaged, in it. Along the outer axis `inside` ranks
        divide the unit inside, and what is worth it is sent in `wire`. Not `packed`: each parameter travels alone.
        """
        if (key := (names, dtype, inside, wire, packed)) not in self._sent:
            wanted = [bool(param.shards) if names is None else param.name in names for param in self.params]
            together = [tuple(place for place in run if wanted[place]) for run in self.messages]
            runs = together if packed else [(place,) for run in together for place in run]
            found = []
            for run in filter(None, runs):
                params = tuple(self.params[place] for place in run)
                kind, sent_in = params[0].gathered_in(dtype) if names is None else params[0].averaged_in(dtype)
                numel = sum(param.numel_of(inside) for param in params)
                found.append(Message(run, params, kind, numel, wire if wire is sent_in and wire is not kind else None))
            self._sent[key] = tuple(found)
        return self._sent[key]

    @cached_property
    def _sent(self) -> dict[tuple[object, ...], tuple[Message, ...]]:
        return {}


@dataclass(frozen=True)
class Layout:
    """All units of a model in the order of its modules, and the stage and axes they are laid out for.

    One axis shards, and one may repeat the shards, or divide them further. With one of tensor parallelism, this is the
    layout of one part of the model.
    """

    units: tuple[Unit, ...]
    stage: Stage = STAGES[3]
    axes: tuple[Axis, ...] = axes_of(1)
    away: bool = False
    """True if shards are in the memory of the host, from which a gather copies them to the device first."""
    hybrid: Hybrid = Hybrid.HSDP
    """What the two axes divide, where one repeats shards."""
    _by_name: dict[str, Unit] = field(init=False, repr=False, compare=False)
    _by_param: dict[str, Unit] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {unit.name: unit for unit in self.units})
        object.__setattr__(self, "_by_param", {param.name: unit for unit in self.units for param in unit.params})
        if len(self._by_name) != len(self.units):
            raise ModelError("units", "two units have one name", "give every unit a name of its own")

    @cached_property
    def sharded(self) -> Axis:
        """The axis over which units are sharded, and gathered."""
        return next(axis for axis in self.axes if axis.kind is AxisKind.SHARD)

    @cached_property
    def outside(self) -> tuple[Axis, ...]:
        """The axes whose ranks have other data, and the same shards or other parts of them: the nearest first."""
        return tuple(axis for axis in reversed(self.axes) if axis.kind is AxisKind.REPLICATE)

    @property
    def has_secondary(self) -> bool:
        """True if primary shards are gathered outside before what that gives is gathered inside."""
        return self.parts > 1

    @property
    def parts(self) -> int:
        """How many primary shards a rank has of a parameter inside, each sent by a message of its own."""
        return 1 if self.hybrid is Hybrid.HSDP else math.prod(axis.size for axis in self.outside)

    @property
    def keeps_secondary(self) -> bool:
        """True if secondary shards are kept until parameters change; stages 1 and 2 keep full copies instead."""
        return self.has_secondary and self.hybrid is Hybrid.HFSDP and self.stage.parameters_sharded

    def secondary_bytes(self, unit: str) -> int:
        """Bytes of the secondary shards of `unit`, as they are gathered inside."""
        return sum(
            p.numel_of(self.sharded.size) * p.full_dtype.itemsize for p in self._by_name[unit].params if p.shards
        )

    @property
    def shards(self) -> int:
        """In how many shards parameters are divided."""
        return self.world if self.has_secondary else self.sharded.size

    @property
    def averaged(self) -> tuple[Axis, ...]:
        """The axes over which gradients are averaged, in this order."""
        return (self.sharded, *self.outside)

    @cached_property
    def tensor(self) -> Axis | None:
        """The axis of tensor parallelism, if there is one."""
        return next((axis for axis in self.axes if axis.kind is AxisKind.TENSOR), None)

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        return next(axis for axis in self.axes if axis.name == name)

    @property
    def world(self) -> int:
        """Ranks that train on other data: N."""
        return math.prod(axis.size for axis in self.averaged)

    def unit(self, name: str) -> Unit:
        return self._by_name[name]

    def has_unit(self, name: str) -> bool:
        return name in self._by_name

    def gathered_bytes(self, unit: str) -> int:
        """Bytes that a gather of `unit` takes: full, padded parameters, but for a shard there that is full already."""
        params = (p for p in self._by_name[unit].params if p.shards > 1 or p.compute_dtype or self.away)
        return sum(param.padded_bytes for param in params)

    def must_gather(self, unit: str) -> bool:
        """True if regions cannot read what a rank keeps of `unit`: it is sharded, or of another dtype."""
        return self.stage.optimizer_sharded or self._by_name[unit].compute_dtype is not None

    def unit_of(self, param: str) -> Unit:
        return self._by_param[param]

    def param(self, name: str) -> Param:
        unit = self._by_param[name]
        return unit.params[unit.index(name)]

    @cached_property
    def params(self) -> tuple[Param, ...]:
        return tuple(param for unit in self.units for param in unit.params)

    @cached_property
    def trainable(self) -> dict[str, Param]:
        return {param.name: param for param in self.params if param.trainable}

    def with_units(self, units: tuple[Unit, ...]) -> Layout:
        return replace(self, units=units)

    @property
    def lines(self) -> list[str]:
        """What ranks compare of it before they have it in common."""
        lines = [f"axis {axis.name}: {axis}" for axis in self.axes]
        lines += [f"{p.name} whole on rank {p.owner}" for p in self.params if p.owner is not None]
        return lines + [f"{p.name} {list(p.shape)} {p.dtype} trainable={p.trainable}" for p in self.params]

    def restricted(self, names: Collection[str]) -> Layout:
        """This layout with only the parameters called `names`, and without units that have none of them."""
        kept = ((unit, tuple(p for p in unit.params if p.name in names)) for unit in self.units)
        return self.with_units(tuple(Unit(unit.name, params, unit.modules) for unit, params in kept if params))

    def owned(self, names: Collection[str]) -> Layout:
        """This layout with each parameter called in `names` kept whole by one rank, where it shards parameters at all.

        The owners follow each other in a unit, so that what one of them sends of it lies side by side.
        """
        shapes = {param.name: param.shape for param in self.params if param.name in names and param.shards}
        return self.owned_by(choose_owners({name: cost_of(shape) for name, shape in shapes.items()}, self.shards))

    def owned_by(self, owners: Mapping[str, int]) -> Layout:
        """This layout with the parameters in `owners` kept whole by these ranks."""

        def place(param: Param) -> tuple[int, bool]:
            return (-1 if param.owner is None else param.owner), not param.shards

        params = ([replace(param, owner=owners.get(param.name)) for param in unit.params] for unit in self.units)
        units = zip(self.units, params, strict=True)
        return self.with_units(
            tuple(Unit(unit.name, tuple(sorted(some, key=place)), unit.modules) for unit, some in units)
        )

    def over(self, world: int, replicas: int = 1) -> Layout:
        """This layout over so many ranks, with what is sharded in as many shards, which repeat `replicas` times.

        Owners are chosen anew, and with them the order of a unit's parameters: for programs that no pass has seen yet.
        """
        parts = 1 if self.tensor is None else self.tensor.size
        sizes = {axis.kind: axis for axis in axes_of(world, parts, replicas=replicas)}
        axes = tuple(replace(sizes[axis.kind], name=axis.name) for axis in self.axes if axis.kind in sizes)
        assert len(axes) == len(sizes), "replicas are those of a layout that has some"
        secondary = self.has_secondary and replicas > 1
        shards = world if secondary else sizes[AxisKind.SHARD].size

        def divide(param: Param, wire: torch.dtype | None) -> Param:
            return replace(param, shards=shards).gathered_as(wire if secondary else None) if param.shards else param

        units = tuple(
            replace(unit, params=tuple(divide(param, unit.outer_gather_dtype) for param in unit.params))
            for unit in self.units
        )
        divided = replace(self, units=units, axes=axes)
        owned = {param.name for param in self.params if param.owner is not None}
        return divided.owned(owned) if owned else divided

    def with_trainable(self, trainable: Mapping[str, bool]) -> Layout:
        """This layout with the `requires_grad` flags of the moment of capture."""
        return self.with_units(
            tuple(
                replace(unit, params=tuple(replace(p, trainable=trainable[p.name]) for p in unit.params))
                for unit in self.units
            )
        )


def cost_of(shape: Sequence[int]) -> int:
    """Multiplications of a product of a matrix of `shape` with its transpose; of what has two dimensions or more.

    That is the cost of an update by Muon, Shampoo or SOAP (Jordan et al., "Muon", 2024; Gupta et al., "Shampoo", ICML
    2018), which the owner of a parameter pays.
    """
    height, width = (shape[0] if shape else 1), math.prod(shape[1:])
    return height * width * min(height, width)


def choose_owners(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """A rank for each name: the longest first, to the one that has the least. Every rank chooses the same.

    The largest load is at most 4/3 of the least possible (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, owner = heapq.heappop(loads)
        owners[name] = owner
        heapq.heappush(loads, (load + costs[name], owner))
    return {name: owners[name] for name in costs}


# -- in fewer bits ----------------------------------------------------------------------------------------------------
#
# In bfloat16, or in int8 with a scale for each block. Of averages each rank averages a part, and ranks exchange the
# averages, both in few bits; two ranks exchange all at once. Of a parameter each rank sends its shard.

BLOCK = 256
"""Elements that share a scale, a float32: 1.6% more bytes. Small, so that one large element costs few others."""
WIRE_DTYPES = (torch.bfloat16, torch.int8)


def part_numel(numel: int, ranks: int) -> int:
    """Elements that a rank averages of `numel`, padding included; of two ranks each averages all."""
    return padded_to_blocks(numel if ranks == 2 else -(-numel // ranks))


def padded_to_blocks(numel: int) -> int:
    """`numel`, rounded up to whole blocks."""
    return -(-numel // BLOCK) * BLOCK


def wire_bytes(numel: int, wire: torch.dtype) -> int:
    """Bytes of `numel` elements, of which int8 has whole blocks."""
    scales = numel // BLOCK * torch.float32.itemsize if wire is torch.int8 else 0
    return numel * wire.itemsize + scales


def shard_wire_bytes(numel: int, wire: torch.dtype) -> int:
    """Bytes of a shard of `numel` elements, of which int8 has whole blocks for each parameter."""
    return wire_bytes(padded_to_blocks(numel) if wire is torch.int8 else numel, wire)


def average_payload(numel: int, ranks: int, wire: torch.dtype) -> int:
    """What an average of `numel` elements moves over `ranks` ranks, of which a rank sends (ranks-1)/ranks, in bytes."""
    parts = 1 if ranks == 2 else ranks
    return 2 * parts * wire_bytes(part_numel(numel, ranks), wire)


def message_places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The bytes [start, stop) of messages of so many bytes; each begins where kernels and collectives like it."""
    ends = list(itertools.accumulate(map(aligned, sizes), initial=0))
    return [(start, start + size) for start, size in zip(ends, sizes, strict=False)]


def secondary_bytes(sizes: Sequence[int]) -> int:
    """Bytes of all of them together."""
    return sum(map(aligned, sizes))
