"""How parameters are sharded: stages, parameters, units, and the layout that holds them.

Vocabulary: a *unit* is the parameters gathered and released together; a *shard* is the part of a parameter that this
rank keeps; *full* is the whole parameter; *padded* is rounded up to a multiple of the world size.
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
"""A parameter of at most this many bytes is packed with its neighbors: a copy costs less than a message."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A ZeRO stage: which of three kinds of state is sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5)."""

    number: int
    optimizer_sharded: bool
    gradients_sharded: bool
    parameters_sharded: bool

    @property
    def volume(self) -> int:
        """Elements that each rank sends in one step, in units of Ψ (N-1)/N (section 7)."""
        return 3 if self.parameters_sharded else 2


STAGES = (
    Stage(0, optimizer_sharded=False, gradients_sharded=False, parameters_sharded=False),
    Stage(1, optimizer_sharded=True, gradients_sharded=False, parameters_sharded=False),
    Stage(2, optimizer_sharded=True, gradients_sharded=True, parameters_sharded=False),
    Stage(3, optimizer_sharded=True, gradients_sharded=True, parameters_sharded=True),
)


class Hybrid(StrEnum):
    """How shards are laid out over two axes of data parallelism.

    A *primary shard* is the part of parameters and optimizer state that a rank keeps. A *secondary shard* is the
    primary shards of all ranks in this rank's group along the outer axis: the input of gathers along the inner axis.
    """

    HSDP = "hsdp"
    """Sharded over the inner axis, replicated over the outer one (MiCS, Zhang et al. 2022): no secondary shards."""
    HFSDP = "hfsdp"
    """Sharded over both axes; secondary shards are kept until parameters change."""
    HPZ = "hpz"
    """Like HFSDP, with secondary shards kept from forward to backward only (ZeRO++, Wang et al. 2023, section 3.2)."""


@dataclass(frozen=True)
class Param:
    """One parameter and the number of shards it is split into on dim 0 (0: every rank keeps it whole).

    All rows of an owned parameter are the shard of its owner; the shards of the other ranks are empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the shard, of the optimizer's state and of the gradient that the optimizer gets."""
    trainable: bool = True
    shards: int = 0
    compute_dtype: torch.dtype | None = None
    """Dtype in which it is gathered and computed with; None for `dtype`."""
    reduction_dtype: torch.dtype | None = None
    """Dtype in which its gradient is averaged; None for the dtype of the full parameter."""
    owner: int | None = None
    """The sharding rank that keeps all of it; None if its rows are divided among these ranks."""
    outer_dtype: torch.dtype | None = None
    """Dtype in which averages of its gradient are sent between replicas; None for the dtype of the average."""
    outer_gather_dtype: torch.dtype | None = None
    """Dtype in which its shards are sent along the outer axis, if it divides them; None for that of the parameter."""

    @cached_property
    def full_dtype(self) -> torch.dtype:
        return self.compute_dtype or self.dtype

    @cached_property
    def reduce_dtype(self) -> torch.dtype:
        return self.reduction_dtype or self.full_dtype

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are summed over micro-batches: that of the average if wider, else None."""
        return self.reduce_dtype if self.reduce_dtype.itemsize > self.full_dtype.itemsize else None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def rows(self) -> int:
        """Rows of dim 0 in one padded shard, divided as by `torch.chunk` and `Shard(0)`: the last shards are short."""
        height = self.shape[0] if self.shape else 1
        return height if not self.shards or self.owner is not None else -(-height // self.shards)

    @cached_property
    def row_numel(self) -> int:
        """Elements of one row of dim 0."""
        return math.prod(self.shape[1:])

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one padded shard; for an owned parameter, the mean over ranks, rounded up."""
        return self.rows * self.row_numel if self.owner is None else -(-self.numel // self.shards)

    def kept_numel(self, rank: int) -> int:
        """Return the elements that `rank` keeps, padding included."""
        return self.shard_numel if self.owner is None else self.numel if rank == self.owner else 0

    @cached_property
    def padded_numel(self) -> int:
        return self.numel if self.owner is not None else self.shard_numel * max(self.shards, 1)

    def gathered_in(self, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype | None]:
        """Return the result dtype of a gather that casts to `dtype`, and the dtype sent along the outer axis."""
        return self.full_dtype if dtype is self.compute_dtype else self.dtype, self.outer_gather_dtype

    def averaged_in(self, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype | None]:
        """Return the result dtype of an average that casts to `dtype`, and the dtype sent along the outer axis."""
        return self.reduce_dtype if dtype is self.reduction_dtype else self.full_dtype, self.outer_dtype

    def numel_of(self, inside: int) -> int:
        """Return the elements that a rank has if `inside` ranks divide the parameter, padding included."""
        return -(-self.padded_numel // inside) if self.shards else self.numel

    @property
    def padded_bytes(self) -> int:
        """Bytes of the padded full parameter."""
        return self.padded_numel * self.full_dtype.itemsize

    def gathered_as(self, wire: torch.dtype | None) -> Param:
        """Return this parameter with shards sent as `wire` along the outer axis, if that takes fewer bytes."""
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
        """Return the rows [start, stop) of dim 0 that `rank` keeps, without padding."""
        height = self.shape[0] if self.shape else 1
        if self.owner is not None:
            return 0, height if rank == self.owner else 0
        index = rank if self.shards else 0
        return min(index * self.rows, height), min((index + 1) * self.rows, height)


@dataclass(frozen=True)
class Message:
    """Parameters of a unit, or their gradients, that are sent together along one axis.

    Attributes:
        places, params: The parameters, and their indices in the unit.
        dtype: The dtype of the gathered parameters or averaged gradients.
        numel: The number of elements that are gathered or averaged, padding included.
        wire: The dtype in which they are sent, if that is not `dtype`: see `part_numel`.
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
        """Bytes of the gathered parameters or averaged gradients."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def shard_numels(self) -> list[int]:
        return [param.shard_numel for param in self.params]

    def parts(self, rank: int | None) -> list[tuple[Param, slice, torch.Size]]:
        """Return each parameter's element range in a received message, and its shape: `rank`'s rows, or all."""
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
        """Return the bytes that each rank has after `ranks` ranks exchange their shards, as they are sent."""
        if self.wire is None:
            return self.nbytes
        return ranks * sum(shard_wire_bytes(numel, self.wire) for numel in self.shard_numels)

    def averaged_bytes(self, ranks: int, *, scatters: bool) -> int:
        """Return the bytes that averaging over `ranks` ranks moves; an all_reduce moves its elements twice."""
        if self.wire is None:
            return (1 if scatters else 2) * self.nbytes
        if scatters:
            return ranks * wire_bytes(padded_to_blocks(self.numel // ranks), self.wire)
        return average_payload(self.numel, ranks, self.wire)


@dataclass(frozen=True)
class Unit:
    """Parameters gathered and released together.

    `messages` lists the parameters of each collective, as indices into `params`. A message of one parameter is sent
    directly from and into contiguous memory; a message of several parameters is packed.
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
        """False if every rank keeps all parameters of this unit whole."""
        return any(param.shards for param in self.params)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype to which parameters are cast when the unit is gathered; None if none is cast."""
        return next((param.compute_dtype for param in self.params if param.compute_dtype), None)

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """The dtype to which gradients are cast when they are reduced; None if none is cast."""
        return next((param.reduction_dtype for param in self.params if param.reduction_dtype), None)

    @property
    def outer_dtype(self) -> torch.dtype | None:
        """Dtype in which averages of gradients are sent between replicas; None for the dtype of the averages."""
        return next((param.outer_dtype for param in self.params if param.outer_dtype), None)

    @property
    def outer_gather_dtype(self) -> torch.dtype | None:
        """Dtype in which shards are sent along the outer axis, unless tiny; None for the dtype of full parameters."""
        return next((param.outer_gather_dtype for param in self.params if param.outer_gather_dtype), None)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    def index(self, name: str) -> int:
        return self._indices[name]

    def sent(
        self,
        names: tuple[str, ...] | None,
        dtype: torch.dtype | None,
        *,
        inside: int = 1,
        wire: torch.dtype | None = None,
        packed: bool = True,
    ) -> tuple[Message, ...]:
        """Return the messages of a line that averages the gradients of `names`, or, if None, gathers the unit.

        The line casts to `dtype` parameters that compute, or are averaged, in it. Along the outer axis, `inside` ranks
        divide the unit along the inner one, and shorter messages are sent in `wire`. Not `packed`: one per parameter.
        """
        if (key := (names, dtype, inside, wire, packed)) not in self._sent:
            wanted = [bool(param.shards) if names is None else param.name in names for param in self.params]
            together = [tuple(index for index in run if wanted[index]) for run in self.messages]
            runs = together if packed else [(index,) for run in together for index in run]
            sent = []
            for run in filter(None, runs):
                params = tuple(self.params[index] for index in run)
                kind, sent_in = params[0].gathered_in(dtype) if names is None else params[0].averaged_in(dtype)
                numel = sum(param.numel_of(inside) for param in params)
                sent.append(Message(run, params, kind, numel, wire if wire is sent_in and wire is not kind else None))
            self._sent[key] = tuple(sent)
        return self._sent[key]

    @cached_property
    def _sent(self) -> dict[tuple[object, ...], tuple[Message, ...]]:
        return {}


@dataclass(frozen=True)
class Layout:
    """All units of a model in the order of its modules, with the stage and the axes that they are laid out for.

    One axis shards; another may replicate the shards or divide them further. With a tensor-parallel axis, this is the
    layout of this rank's part of the model.
    """

    units: tuple[Unit, ...]
    stage: Stage = STAGES[3]
    axes: tuple[Axis, ...] = axes_of(1)
    away: bool = False
    """True if shards are in host memory, from which a gather copies them to the device first."""
    hybrid: Hybrid = Hybrid.HSDP
    """How shards are laid out over two data-parallel axes, if there are two."""
    _by_name: dict[str, Unit] = field(init=False, repr=False, compare=False)
    _by_param: dict[str, Unit] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {unit.name: unit for unit in self.units})
        object.__setattr__(self, "_by_param", {param.name: unit for unit in self.units for param in unit.params})
        if len(self._by_name) != len(self.units):
            raise ModelError("units", "two units have one name", "give every unit a name of its own")

    @cached_property
    def sharded(self) -> Axis:
        """The axis over which units are sharded and gathered: the inner one of two."""
        return next(axis for axis in self.axes if axis.kind is AxisKind.SHARD)

    @cached_property
    def outside(self) -> tuple[Axis, ...]:
        """The outer axes of data parallelism, the nearest first: their ranks have other data, maybe equal shards."""
        return tuple(axis for axis in reversed(self.axes) if axis.kind is AxisKind.REPLICATE)

    @property
    def has_secondary(self) -> bool:
        """True if units are gathered along the outer axis first, to secondary shards, then along the inner one."""
        return self.parts > 1

    @property
    def parts(self) -> int:
        """How many primary shards a secondary shard consists of; inner gathers send each in a message of its own."""
        return 1 if self.hybrid is Hybrid.HSDP else math.prod(axis.size for axis in self.outside)

    @property
    def keeps_secondary(self) -> bool:
        """True if secondary shards are kept until parameters change; stages 1 and 2 keep full parameters instead."""
        return self.has_secondary and self.hybrid is Hybrid.HFSDP and self.stage.parameters_sharded

    def secondary_bytes(self, unit: str) -> int:
        """Return the bytes of this rank's secondary shards of `unit`."""
        return sum(
            p.numel_of(self.sharded.size) * p.full_dtype.itemsize for p in self._by_name[unit].params if p.shards
        )

    @property
    def shards(self) -> int:
        """The number of shards that parameters are divided into."""
        return self.world if self.has_secondary else self.sharded.size

    @property
    def averaged(self) -> tuple[Axis, ...]:
        """The axes over which gradients are averaged, in order."""
        return (self.sharded, *self.outside)

    @cached_property
    def tensor(self) -> Axis | None:
        """The tensor-parallel axis, if there is one."""
        return next((axis for axis in self.axes if axis.kind is AxisKind.TENSOR), None)

    @cached_property
    def sequence(self) -> Axis | None:
        """The axis over which tokens are divided, if there is one."""
        return next((axis for axis in self.axes if axis.kind is AxisKind.SEQUENCE), None)

    def axis(self, name: str) -> Axis:
        """Return the axis called `name`."""
        return next(axis for axis in self.axes if axis.name == name)

    @property
    def world(self) -> int:
        """The number of data-parallel ranks: N."""
        return math.prod(axis.size for axis in self.averaged)

    def unit(self, name: str) -> Unit:
        return self._by_name[name]

    def has_unit(self, name: str) -> bool:
        return name in self._by_name

    def gathered_bytes(self, unit: str) -> int:
        """Return the bytes that a gather of `unit` allocates: padded full parameters, except shards used in place."""
        params = (p for p in self._by_name[unit].params if p.shards > 1 or p.compute_dtype or self.away)
        return sum(param.padded_bytes for param in params)

    def must_gather(self, unit: str) -> bool:
        """Return True if regions cannot read a rank's shards of `unit`: they are partial, or of another dtype."""
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
        """Lines that ranks compare before they rely on having the same layout."""
        lines = [f"axis {axis.name}: {axis}" for axis in self.axes]
        lines += [f"{p.name} whole on rank {p.owner}" for p in self.params if p.owner is not None]
        return lines + [f"{p.name} {list(p.shape)} {p.dtype} trainable={p.trainable}" for p in self.params]

    def restricted(self, names: Collection[str]) -> Layout:
        """Return this layout with only the parameters called `names`, without units that have none of them."""
        kept = ((unit, tuple(p for p in unit.params if p.name in names)) for unit in self.units)
        return self.with_units(tuple(Unit(unit.name, params, unit.modules) for unit, params in kept if params))

    def owned(self, names: Collection[str]) -> Layout:
        """Return this layout with each parameter in `names` that is sharded kept whole by one rank, its owner.

        A unit's parameters are sorted by owner, so that the parameters that an owner sends are adjacent.
        """
        shapes = {param.name: param.shape for param in self.params if param.name in names and param.shards}
        return self.owned_by(choose_owners({name: cost_of(shape) for name, shape in shapes.items()}, self.shards))

    def owned_by(self, owners: Mapping[str, int]) -> Layout:
        """Return this layout with the parameters in `owners` kept whole by these ranks."""

        def order(param: Param) -> tuple[int, bool]:
            return (-1 if param.owner is None else param.owner), not param.shards

        params = ([replace(param, owner=owners.get(param.name)) for param in unit.params] for unit in self.units)
        units = zip(self.units, params, strict=True)
        return self.with_units(
            tuple(Unit(unit.name, tuple(sorted(some, key=order)), unit.modules) for unit, some in units)
        )

    def over(self, world: int, replicas: int = 1) -> Layout:
        """Return this layout over `world` data-parallel ranks, of which `replicas` groups have the same shards.

        Owners are chosen again, which may reorder a unit's parameters: only for programs that no pass has changed yet.
        """
        parts = 1 if self.tensor is None else self.tensor.size
        sizes = {axis.kind: axis for axis in axes_of(world, parts, replicas=replicas)}
        axes = tuple(replace(sizes[axis.kind], name=axis.name) for axis in self.axes if axis.kind in sizes)
        assert len(axes) == len(sizes), "only a layout with an outer axis has replicas"
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
        """Return this layout with the `requires_grad` flags at the time of capture."""
        return self.with_units(
            tuple(
                replace(unit, params=tuple(replace(p, trainable=trainable[p.name]) for p in unit.params))
                for unit in self.units
            )
        )


def cost_of(shape: Sequence[int]) -> int:
    """Return the multiplications of the product of a matrix of `shape`, flattened to 2-D, with its transpose.

    It is proportional to the cost of an update by Muon, Shampoo or SOAP (Jordan et al., "Muon", 2024; Gupta et al.,
    "Shampoo", ICML 2018), which only the parameter's owner computes.
    """
    height, width = (shape[0] if shape else 1), math.prod(shape[1:])
    return height * width * min(height, width)


def choose_owners(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign each name to a rank, in order of decreasing cost, each to the least loaded rank; deterministic.

    The largest load is at most 4/3 of the optimum (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, owner = heapq.heappop(loads)
        owners[name] = owner
        heapq.heappush(loads, (load + costs[name], owner))
    return {name: owners[name] for name in costs}


# -- compressed messages ----------------------------------------------------------------------------------------------
#
# Sent in bfloat16, or in int8 with a scale per block. To average gradients, each rank averages one part and the ranks
# exchange the averaged parts, both compressed; two ranks exchange everything at once. To gather, each sends its shard.

BLOCK = 256
"""Elements that share a float32 scale: 1.6% more bytes. Small, so that one large element affects few others."""
WIRE_DTYPES = (torch.bfloat16, torch.int8)


def part_numel(numel: int, ranks: int) -> int:
    """Return how many of `numel` elements each rank averages, padding included; two ranks both average all."""
    return padded_to_blocks(numel if ranks == 2 else -(-numel // ranks))


def padded_to_blocks(numel: int) -> int:
    """Return `numel` rounded up to whole blocks."""
    return -(-numel // BLOCK) * BLOCK


def wire_bytes(numel: int, wire: torch.dtype) -> int:
    """Return the bytes of `numel` elements sent as `wire`; for int8, `numel` is a multiple of BLOCK."""
    scales = numel // BLOCK * torch.float32.itemsize if wire is torch.int8 else 0
    return numel * wire.itemsize + scales


def shard_wire_bytes(numel: int, wire: torch.dtype) -> int:
    """Return the bytes of one parameter's shard of `numel` elements sent as `wire`; int8 pads it to whole blocks."""
    return wire_bytes(padded_to_blocks(numel) if wire is torch.int8 else numel, wire)


def average_payload(numel: int, ranks: int, wire: torch.dtype) -> int:
    """Return the bytes that averaging `numel` elements over `ranks` ranks moves; a rank sends (ranks-1)/ranks of it."""
    parts = 1 if ranks == 2 else ranks
    return 2 * parts * wire_bytes(part_numel(numel, ranks), wire)


def message_places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the byte range [start, stop) of each message in one buffer; starts are aligned to `ALIGNMENT`."""
    ends = list(itertools.accumulate(map(aligned, sizes), initial=0))
    return [(start, start + size) for start, size in zip(ends, sizes, strict=False)]


def secondary_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the buffer for secondary shards of `sizes` bytes, each aligned."""
    return sum(map(aligned, sizes))
