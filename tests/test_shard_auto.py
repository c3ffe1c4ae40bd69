"""shard="auto": what a mesh's dimensions divide is chosen by the memory at hand and the links, on all ranks alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.cases import diagonal, quickly
from tests.compare import differing, parameters
from tests.hybrids import adamw, mesh_of, train
from tests.models import MODELS, batch, make, update
from tests.ranks import Ranks, on_ranks
from tests.refusals import error_of
from zcompile import AgreementError, OptionError
from zcompile.cost.hardware import Hardware, Link
from zcompile.ir.layout import STAGES, Hybrid, Layout
from zcompile.ir.operation import op_of
from zcompile.ir.ops import AllGather
from zcompile.model.units import axes_over, make_layout
from zcompile.schedule.options import Options
from zcompile.schedule.shard_choice import Estimate, as_message, choose, estimate, room_in, traffic_of
from zcompile.tools.tracing import trace

GIGABIT = 125e6


def hardware(outside: float, inside: float = 100 * GIGABIT, latency: float = 1e-5) -> Hardware:
    links = (Link("inside", latency, inside, 2), Link("outside", latency, outside))
    return replace(Hardware.of(flops=1e12, memory_bandwidth=1e11), links=links)


def layout_of(kind: str, stage: int, shard: str) -> Layout:
    model = make(kind)
    axes = axes_over(model, 4, 1 if shard == "flat" else 2)
    return make_layout(model, STAGES[stage], axes, hybrid=Hybrid.HSDP if shard == "flat" else Hybrid(shard))


def estimates(rates: Hardware, kind: str = "gpt", stage: int = 3) -> dict[str, Estimate]:
    return {shard: estimate(shard, layout_of(kind, stage, shard), rates) for shard in ("flat", *Hybrid)}


# -- what is counted --------------------------------------------------------------------------------------------------


@diagonal("kind, shard, stage", sorted(MODELS), ["flat", *Hybrid], [1, 3], pairs=False)
def test_what_is_counted_is_what_a_traced_program_sends(kind: str, shard: str, stage: int) -> None:
    layout = layout_of(kind, stage, shard)
    traced = trace(make(kind), batch(kind, 0, 0))
    pipeline = Options(stage=stage, prefetch=0, backend="eager").pipeline(keeps=False)
    program = pipeline.run(replace(traced, layout=layout.with_trainable(dict.fromkeys(layout.trainable, True))))
    # A unit that the backward does not read is gathered once, and one that is tied once more.
    gathers = Counter(op_of(node, AllGather).unit for node in program.nodes(AllGather))
    counted: dict[str, int] = {}
    for unit in layout.units:
        for traffic, times in traffic_of(unit, layout):
            name = traffic.axis.name
            counted[name] = counted.get(name, 0) + traffic.sent * (gathers[unit.name] if times > 1 else 1)
    assert counted == program.volumes()


def test_slow_links_outside_are_used_little_and_equal_ones_alike() -> None:
    slow, alike = estimates(hardware(GIGABIT)), estimates(hardware(1e15, 1e15, 0.0))
    assert slow["flat"].seconds > slow["hsdp"].seconds, "flat sends three times outside what hybrids send"
    assert slow["hfsdp"].seconds == slow["hpz"].seconds
    assert alike["flat"].seconds < alike["hsdp"].seconds, "an optimizer of every rank's own part is what is left"


def test_state_is_that_of_the_layout() -> None:
    found = estimates(hardware(GIGABIT))
    assert found["flat"].nbytes < found["hpz"].nbytes <= found["hfsdp"].nbytes < found["hsdp"].nbytes


def test_shards_that_are_elsewhere_take_no_memory_of_the_device() -> None:
    layout = layout_of("gpt", 3, "hsdp")
    near, away = (estimate("hsdp", replace(layout, away=away), hardware(GIGABIT)) for away in (False, True))
    assert away.nbytes < near.nbytes / 3


# -- what is chosen ---------------------------------------------------------------------------------------------------


def chosen(*ranks: tuple[dict[str, tuple[float, int]], int]) -> str:
    told = [as_message([Estimate(name, *figures) for name, figures in found.items()], room) for found, room in ranks]
    return choose(told).chosen.shard


def test_the_fastest_that_fits_is_chosen_and_of_equals_the_smallest() -> None:
    found = {"flat": (3.0, 10), "hsdp": (1.0, 40), "hfsdp": (2.0, 20), "hpz": (2.0, 15)}
    assert chosen((found, 40)) == "hsdp"
    assert chosen((found, 39)) == "hpz"
    assert chosen((found, 14)) == "flat"
    assert chosen((found, 9)) == "flat", "where none fits, what comes nearest"


def test_the_slowest_rank_and_the_one_with_the_least_room_decide() -> None:
    first, second = {"flat": (1.0, 10), "hsdp": (2.0, 40)}, {"flat": (3.0, 10), "hsdp": (2.0, 40)}
    assert chosen((first, 50), (second, 50)) == chosen((second, 50), (first, 50)) == "hsdp"
    assert chosen((first, 50), (second, 30)) == "flat"


def test_half_of_the_memory_is_for_activations_unless_a_limit_says_how_much() -> None:
    assert room_in(100.0, None) == 50
    assert room_in(100.0, 30) == 70
    assert room_in(100.0, 130) == 0


# -- on ranks ---------------------------------------------------------------------------------------------------------


def compiled_by(rank: int, how: str, shape: tuple[int, int]) -> tuple[str, str, list[str]]:
    """What was chosen, what is said of it, and what differs from asking for that."""
    options: dict[str, Any] = {"mesh": mesh_of(shape), "backend": "eager", "shard": "auto"}
    if how == "whole":
        options["whole"] = [name for name, param in make("mlp").named_parameters() if param.dim() == 2]
    if how == "across":
        options["outer_dtype"] = torch.bfloat16
    if how == "gathered in few bits":
        options["outer_gather_dtype"] = torch.bfloat16
    model = zcompile.compile(make("mlp", seed=rank), **options)
    optimizer = adamw(model)
    step = zcompile.train_step(model, lambda model, *given: model(*given), optimizer) if how == "step" else None
    for number in range(3):
        if step is not None:
            step(*batch("mlp", rank, number))
        else:
            model(*batch("mlp", rank, number)).backward()
            update(optimizer)
    layout = model.layout
    shard = str(layout.hybrid) if layout.outside else "flat"
    beside = {key: options[key] for key in options if key in ("whole", "outer_dtype", "outer_gather_dtype")}
    return shard, model.explain(), differing(parameters(model), train(rank, "mlp", shape, shard=shard, **beside))


CHOICES = {"whole": ("flat", "hsdp"), "across": tuple(Hybrid), "gathered in few bits": ("hfsdp", "hpz")}


@pytest.mark.slow
@quickly("how", ["loop", "step", *CHOICES], ["gathered in few bits"])
def test_all_ranks_choose_alike_and_train_as_if_it_had_been_asked_for(ranks: Ranks, how: str) -> None:
    found = ranks.run(4, compiled_by, how, (2, 2))
    assert len({(shard, said) for shard, said, _ in found}) == 1
    shard, said, _ = found[0]
    assert f'shard="auto" is {shard!r}, the fastest that fits' in said
    assert shard in CHOICES.get(how, ("flat", *Hybrid))
    assert [wrong for *_, wrong in found] == [[]] * 4


def by_backend(rank: int) -> tuple[str, str]:
    backend = zcompile.backend(mesh=mesh_of((2, 2)), shard="auto")
    model = torch.compile(make("mlp"), backend=backend)
    model(*batch("mlp", rank, 0)).backward()
    return str(backend.options.shard), backend.explain()


@pytest.mark.slow
def test_the_backend_chooses_by_the_parameters_of_the_first_graph(ranks: Ranks) -> None:
    found = ranks.run(4, by_backend)
    assert len(set(found)) == 1
    assert f'shard="auto" is {found[0][0]!r}' in found[0][1]


@on_ranks(2)
def test_a_mesh_of_one_dimension_leaves_nothing_to_choose(rank: int) -> None:
    assert zcompile.compile(make("mlp"), shard="auto", backend="eager").layout.outside == ()


def some_ask(rank: int) -> str:
    return error_of(
        lambda: zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), shard="auto" if rank else "hsdp", backend="eager"),
        AgreementError,
    )


def test_ranks_that_do_not_all_ask_are_told(ranks: Ranks) -> None:
    found = ranks.run(4, some_ask)
    assert len(set(found)) == 1
    assert "rank" in found[0]


def unlike(rank: int, what: str) -> str:
    """All ask, of another mesh, or with owners on one rank alone."""
    names = ("shard", "replicate") if what == "axis" and rank == 3 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    whole = ["layers.0.weight"] if what == "whole" and rank == 3 else None
    dist.barrier()
    return error_of(
        lambda: zcompile.compile(make("mlp"), mesh=mesh, shard="auto", whole=whole, backend="eager"), AgreementError
    )


@pytest.mark.parametrize("what", ["axis", "whole"])
def test_ranks_that_ask_of_other_things_are_told_before_they_measure(ranks: Ranks, what: str) -> None:
    found = ranks.run(4, unlike, what, group=10)
    assert len(set(found)) == 1
    assert "rank 3: " in found[0]
    assert what in found[0]


@on_ranks(4)
def test_gathers_in_few_bits_leave_nothing_to_choose_beside_owners(rank: int) -> None:
    options: dict[str, Any] = {"outer_gather_dtype": torch.bfloat16, "whole": ["layers.0.weight"]}
    with pytest.raises(OptionError) as raised:
        zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), shard="auto", **options)
    message = str(raised.value)
    assert message.startswith('outer_gather_dtype: is for what "hfsdp" and "hpz" gather')
    assert "give no whole=" in message


def test_stage_0_divides_nothing() -> None:
    with pytest.raises(OptionError, match="stage 0 divides nothing"):
        Options(stage=0, shard="auto")


def test_a_misspelt_setting_is_told_the_nearest_one_as_it_is_given() -> None:
    with pytest.raises(OptionError, match=r"did you mean 'hfsdp'\? choose from 'auto', 'flat', 'hfsdp', 'hpz', 'hsdp'"):
        Options(shard="hfspd")
