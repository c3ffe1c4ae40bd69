"""What becomes of a unit's parameters on the ranks that have it: bytes of them, and seconds of their communication."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import model_state
from zcompile.cost.simulator import UPDATE_BYTES
from zcompile.ir.axis import Axis
from zcompile.ir.layout import Layout, Stage, Unit
from zcompile.ir.ops import AllGather, Reduce


@dataclass(frozen=True)
class UnitLayout:
    """What becomes of a unit's parameters: bytes, and seconds of their communication.

    Attributes:
        shards: Bytes of this rank's shards.
        moments: Of their optimizer state.
        full: Of the gathered parameters.
        gradients: Of the gradients that a backward gives.
        sums: Of their sums over micro-batches.
        averages: Of what a reduction leaves this rank.
        gather: Seconds of the gather.
        reduce: Seconds of the reduction.
        update: Seconds of the optimizer's step.
    """

    shards: int
    moments: int
    full: int
    gradients: int
    sums: int
    averages: int
    gather: float
    reduce: float
    update: float

    @classmethod
    def of(cls, units: tuple[Unit, ...], stage: Stage, axes: tuple[Axis, ...], hardware: Hardware) -> UnitLayout:
        """That of units which were laid out for any ranks, under a ZeRO stage and over these axes."""
        layout = Layout(units, stage, axes)
        size = layout.sharded.size if stage.optimizer_sharded else 0
        divided = (tuple(replace(p, shards=size if p.shards else 0) for p in unit.params) for unit in units)
        layout = layout.with_units(tuple(replace(u, params=some) for u, some in zip(units, divided, strict=True)))
        state, gather, reduce = model_state(layout), 0.0, 0.0
        for unit in layout.units:
            if stage.optimizer_sharded:
                sent = AllGather(unit.name)
                gather += hardware.collective_seconds(sent.payload(layout), layout.sharded, len(sent.messages(layout)))
            names = tuple(param.name for param in unit.params if param.trainable)
            sums = Reduce(unit.name, names, stage.optimizer_sharded)
            reduce += hardware.collective_seconds(sums.payload(layout), layout.sharded, len(sums.messages(layout)))
        full = sum(layout.gathered_bytes(unit.name) for unit in layout.units)
        trained = layout.trainable.values()
        gradients = sum(param.numel * param.full_dtype.itemsize for param in trained)
        summed = sum(param.numel * (param.sum_dtype or param.full_dtype).itemsize for param in trained)
        averages = sum(param.padded_numel * param.reduce_dtype.itemsize // max(size, 1) for param in trained)
        averages = gradients if size == 1 else averages  # alone, a gradient is its own average
        update = UPDATE_BYTES * state.gradients / hardware.memory_bandwidth
        return cls(state.parameters, state.moments, full, gradients, summed, averages, gather, reduce, update)
