"""The simulator on programs small enough to work out by hand, and the cost model of regions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import zcompile
from tests.models import batch, make
from tests.passes.programs import CHAIN, GATHERED, TENSOR_PARALLEL, parsed
from tests.passes.test_partition_activations import SAME
from zcompile.cost.hardware import Hardware, Link
from zcompile.cost.roofline import FORMULAS, region_seconds
from zcompile.cost.simulator import UPDATE_BYTES, simulate
from zcompile.cost.timeline import Sent, Spent
from zcompile.ir.axis import Axis, AxisKind, axes_of
from zcompile.ir.layout import STAGES, Layout
from zcompile.ir.operation import Data, set_data
from zcompile.ir.ops import Compute, Input, Kind, Results
from zcompile.ir.region import Region
from zcompile.ir.tensor_type import TensorType
from zcompile.model.units import make_layout
from zcompile.passes.gather_ahead import gather_ahead
from zcompile.passes.insert_updates import insert_updates
from zcompile.passes.partition_activations import partition_activations
from zcompile.passes.schedule_prefetch import schedule_prefetch

PRODUCT = 2 * 8 * 4 * 4
"""FLOPs of a product of the chain, of which a rank has eight in a step."""
HALF = 4 * 4 * 4 / 2
"""Bytes that a rank of two sends of one weight."""
RATES = Hardware.of(flops=1e9, memory_bandwidth=1e18, bandwidth=1e8)


def test_a_step_without_prefetch_waits_for_every_gather() -> None:
    timeline = simulate(parsed(CHAIN, GATHERED), RATES)
    assert timeline.compute == pytest.approx(8 * PRODUCT / 1e9)
    assert timeline.exposed == pytest.approx(4 * HALF / 1e8)
    assert timeline.hidden == pytest.approx(0)
    assert timeline.seconds == pytest.approx(timeline.compute + timeline.exposed)
    assert [message.unit for message in timeline.messages or ()] == ["a", "b", "c", "b"]


def test_prefetch_hides_what_compute_covers() -> None:
    timeline = simulate(schedule_prefetch(parsed(CHAIN, GATHERED), prefetch=1), RATES)
    flight, product = HALF / 1e8, PRODUCT / 1e9
    # Nothing hides the first; while the forward computes a and b, what follows them is on its way, and in the backward.
    assert timeline.exposed == pytest.approx(flight + 2 * (flight - product))
    assert timeline.hidden == pytest.approx(4 * flight - timeline.exposed)


def test_what_the_processor_sends_it_does_not_compute() -> None:
    slow = replace(RATES, sending=1e-6)
    plain, sending = (simulate(parsed(CHAIN, GATHERED), one) for one in (RATES, slow))
    assert sending.exposed - plain.exposed <= 4 * HALF * 1e-6
    sends = [event for event in sending.events if event.operation == "send"]
    assert [event.seconds for event in sends] == pytest.approx([HALF * 1e-6] * 4)


def test_events_follow_each_other_and_add_up() -> None:
    timeline = simulate(schedule_prefetch(parsed(CHAIN, GATHERED), prefetch=1), RATES, steps=True)
    ends = [0.0, *(event.end for event in timeline.events)]
    assert [event.start for event in timeline.events] == pytest.approx(ends[:-1])
    assert sum(event.own for event in timeline.events) == pytest.approx(timeline.seconds)
    assert "predicted" in str(timeline)
    assert timeline.trace_events()


def test_an_optimizer_reads_and_writes_its_state() -> None:
    program, hardware = parsed(CHAIN, GATHERED), replace(RATES, memory_bandwidth=1e6)
    nbytes = sum(param.shard_numel * 4 for param in program.layout.params)
    assert simulate(program, hardware).optimizer == 0
    assert simulate(program, hardware, steps=True).optimizer == pytest.approx(UPDATE_BYTES * nbytes / 1e6)


@pytest.mark.slow
def test_a_train_step_takes_the_same_by_units() -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    compiled(*batch("gpt", 0, 0)).backward()
    program, hardware = compiled.programs[0], replace(RATES, memory_bandwidth=1e6)
    updating = gather_ahead(insert_updates(program))
    whole, by_units = (simulate(one, hardware, steps=True).optimizer for one in (program, updating))
    assert by_units == pytest.approx(whole)
    assert simulate(updating, hardware).spent(Spent.OPTIMIZER, unit="blocks.0") > 0


def test_stage_0_steps_for_whole_parameters() -> None:
    hardware = replace(RATES, memory_bandwidth=1e6)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = zcompile.compile(model, backend="eager", stage=0)
    compiled(torch.ones(3, 4)).sum().backward()
    nbytes = sum(param.nbytes for param in model.parameters())
    program = replace(compiled.programs[0], layout=make_layout(model, STAGES[0], axes_of(2)))
    assert simulate(program, hardware, steps=True).optimizer == pytest.approx(UPDATE_BYTES * nbytes / 1e6)


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def test_parts_of_activations_arrive_on_a_wire_of_their_own() -> None:
    # Gathers of parameters fly at the same time as a fetch, which takes as long as a collective over its group.
    program = partition_activations(parsed(TENSOR_PARALLEL, SAME), least=1)
    found = simulate(program, RATES).messages or ()
    assert [(message.operation, message.nbytes) for message in found] == [("fetch", 128 * 2 // 3)]
    assert found[0].end - found[0].start == pytest.approx(128 * 2 / 3 / 1e8)
    assert list(simulate(program, RATES).flights()) == ["communication, tp"]


def test_what_flies_at_the_same_time_has_a_lane_of_its_own() -> None:
    timeline = simulate(parsed(CHAIN, GATHERED), RATES)
    times = [(0, 2), (1, 3), (2, 4), (3, 5), (3, 6)]
    made = replace(timeline, messages=[Sent("all_gather", str(i), 1, *time) for i, time in enumerate(times)])
    lanes = {name: [int(message.unit) for message in lane] for name, lane in made.flights().items()}
    assert lanes == {"communication": [0, 2], "communication 2": [1, 3], "communication 3": [4]}


def test_data_parallel_groups_share_links_with_those_of_other_parts() -> None:
    program = parsed(CHAIN, GATHERED)
    nodes = replace(RATES, links=(Link("inside", 0.0, 1e12, members=2), Link("between", 0.0, 1e8)))
    apart = replace(program, layout=replace(program.layout, axes=axes_of(2, 2)))
    assert simulate(program, nodes).exposed < 1e-8  # both ranks in one node
    assert simulate(apart, nodes).exposed == pytest.approx(2 * 4 * HALF / 1e8)  # one in each, half of its link


# -- regions ----------------------------------------------------------------------------------------------------------

aten = torch.ops.aten
LARGE = TensorType.make(torch.float32, (1000, 100))
NBYTES = LARGE.nbytes


def region(build: Callable[[fx.Graph, fx.Node], fx.Node], *, fuses: bool) -> Region:
    """A region of one input of the type LARGE, all of whose values have it."""
    graph = fx.Graph()
    x = set_data(graph.placeholder("x"), Data(Input(Kind.DATA, 0), type=LARGE))
    end = build(graph, x)
    for node in graph.nodes:
        if node.op == "call_function":
            set_data(node, Data(Compute(), type=LARGE))
    set_data(graph.output((end,)), Data(Results()))
    return Region("r", graph, ((0, None),), fuses=fuses)


def chain_of(*targets: object) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        for target in targets:
            x = graph.call_function(target, (x,))  # type: ignore[arg-type]
        return x

    return build


SLOW_MEMORY = replace(Hardware.of(flops=1e18, memory_bandwidth=1e9), launch=1e-3)


def test_operations_that_run_one_by_one_each_read_and_write() -> None:
    made = region(chain_of(aten.neg.default, aten.abs.default, aten.neg.default), fuses=False)
    assert region_seconds(made, SLOW_MEMORY) == pytest.approx(3 * (2 * NBYTES / 1e9 + 1e-3))


def test_a_fused_chain_reads_once_and_writes_once() -> None:
    made = region(chain_of(aten.neg.default, aten.abs.default, aten.neg.default), fuses=True)
    assert region_seconds(made, SLOW_MEMORY) == pytest.approx(2 * NBYTES / 1e9 + 1e-3)


def test_a_fused_operation_reads_what_others_have_stored() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        sorted_ = graph.call_function(aten.cumsum.default, (x, 0))
        return graph.call_function(aten.add.Tensor, (graph.call_function(aten.neg.default, (sorted_,)), x))

    # cumsum reads and writes by itself; the sum reads its result and x, and writes.
    assert region_seconds(region(build, fuses=True), SLOW_MEMORY) == pytest.approx(5 * NBYTES / 1e9 + 2e-3)


def test_functions_take_their_own_time() -> None:
    hardware = replace(Hardware.of(flops=1e18, memory_bandwidth=math.inf), functions=1e6)
    made = region(chain_of(aten.tanh.default, aten.neg.default, aten.exp.default), fuses=True)
    assert region_seconds(made, hardware) == pytest.approx(2 * 1000 * 100 / 1e6)


def test_products_and_attention_have_rates_by_dtype() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 96, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(x).view(2, 16, 3, 32).unbind(2)
            return nn.functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        compiled = zcompile.compile(Attends(), backend="eager", dtype=dtype)
        with torch.no_grad():
            compiled(torch.ones(2, 16, 32))
        for share in (1.0, 0.5):
            flops = {"float32": 1e9, "bfloat16": 4e9}
            hardware = replace(Hardware.of(flops=1e9, memory_bandwidth=1e18), flops=flops, attention=share)
            seconds[dtype, share] = simulate(compiled.programs[0], hardware).compute
    product, attention = 2 * 2 * 16 * 32 * 96, 2 * 2 * 2 * 16 * 16 * 32
    assert seconds[torch.float32, 1.0] == pytest.approx((product + attention) / 1e9)
    assert seconds[torch.float32, 0.5] == pytest.approx((product + 2 * attention) / 1e9)
    assert seconds[torch.bfloat16, 1.0] == pytest.approx((product + attention) / 4e9)


@pytest.mark.parametrize("kind", ["flash_attention_for_cpu", "flash_attention", "efficient_attention"])
def test_attention_counts_keys_for_each_head_that_shares_them(kind: str) -> None:
    query, key, shared = (2, 8, 16, 4), (2, 8, 12, 4), (2, 2, 12, 4)
    forward, backward = (getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{end}") for end in ("", "_backward"))
    assert FORMULAS[forward](query, shared, shared) == FORMULAS[forward](query, key, key) == 2 * 2 * 8 * 2 * 16 * 12 * 4
    for given in (shared, key):
        assert FORMULAS[backward](query, query, given, given) == 5 * 2 * 8 * 2 * 16 * 12 * 4


def test_the_models_own_collectives_take_their_time_within_regions() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        sent = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
        return graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sent,))

    slow = replace(SLOW_MEMORY, links=(Link("inside", 1e-3, 1e6),), launch=0.0)
    made = region(build, fuses=True)
    assert region_seconds(made, slow) == 0.0
    layout = Layout((), axes=(Axis("tp", AxisKind.TENSOR, 4),))
    assert region_seconds(made, slow, layout) == pytest.approx(2e-3 + 2 * NBYTES * 3 / 4 / 1e6)


@pytest.mark.parametrize("latency", [0.0, 1.0])
def test_what_is_computed_before_the_wait_hides_a_collective(latency: float) -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        sent = [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")) for _ in "ab"]
        y = graph.call_function(aten.neg.default, (x,))
        waits = [graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (one,)) for one in sent]
        return graph.call_function(aten.add.Tensor, (y, waits[1]))

    hardware = replace(SLOW_MEMORY, links=(Link("inside", latency, 1e15),), launch=0.0)
    layout = Layout((), axes=(Axis("tp", AxisKind.TENSOR, 4),))
    hidden, after = 2 * NBYTES / 1e9, 3 * NBYTES / 1e9
    found = region_seconds(region(build, fuses=False), hardware, layout)
    assert found == pytest.approx(max(hidden, 2 * 2 * latency) + after, rel=1e-3)


def test_exchanges_of_parts_of_sequences_are_over_their_own_axis() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        whole = graph.call_function(torch.ops.zcompile.all_gather.default, (x, 0, 1, 2, [0], "sp"))
        return graph.call_function(torch.ops.zcompile.shard.default, (whole, 0, 1, 2, [0], "sp"))

    slow = replace(SLOW_MEMORY, links=(Link("inside", 1e-3, 1e6),), launch=0.0, memory_bandwidth=1e18)
    axes = Axis("tp", AxisKind.TENSOR, 4), Axis("sp", AxisKind.SEQUENCE, 2, 4)
    made = region(build, fuses=True)
    assert region_seconds(made, slow, Layout((), axes=axes[:1])) == 0.0
    assert region_seconds(made, slow, Layout((), axes=axes)) == pytest.approx(
        1e-3 + NBYTES / 2 / 1e6
    )  # all values of `region` have one size


def test_collectives_of_several_tensors_send_them_all() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        y = graph.call_function(aten.neg.default, (x,))
        return graph.call_function(torch.ops._c10d_functional.all_reduce_coalesced.default, ([x, y], "sum", "0"))

    slow = replace(SLOW_MEMORY, links=(Link("inside", 0.0, 1e6),), launch=0.0, memory_bandwidth=1e18)
    axis = Axis("tp", AxisKind.TENSOR, 2)
    assert region_seconds(region(build, fuses=True), slow, Layout((), axes=(axis,))) == pytest.approx(
        2 * 2 * NBYTES / 2 / 1e6
    )
