"""Every way to train on a GPU: nothing is left to its timing, and the host waits no more than it must."""

from __future__ import annotations

import pytest

from tests.cases import quickly
from tests.ranks import Ranks
from tests.simulated import scenarios
from tests.simulated.scenarios import SCENARIOS

QUICK = (
    "stage 3, graph breaks",
    "stage 3, parameters, reduction fails",
    "hpz, int8 gathers, parameters",
    "owners, bf16, arenas, checkpoint",
)
WAITS: dict[str, int | tuple[int, ...]] = {
    # Copies to the device have to end before the host may write to shards, those of gradients before it steps.
    "stage 2, parameters": 2,
    "stage 3, parameters": 2,
    "hybrid, parameters": 2,
    "hpz, parameters": 2,
    "hpz, int8 gathers, parameters": 2,
    "owners, parameters": 2,
    "owners, float16, scaling": 1,
    "owners, train step, optimizer": 1,
    "stage 3, parameters, arenas": 2,
    "stage 3, graphs, parameters": 2,
    "stage 3, parameters, bf16, arenas": 2,
    "stage 3, parameters, gather fails": 2,
    "stage 3, parameters, backward fails": 2,
    "stage 3, parameters, reduction fails": 2,
    # The forward that gathers, and each of two backwards.
    "stage 2, parameters, accumulating": 3,
    # The forwards, the backwards of two fragments, and their module's own gradients.
    "stage 3, parameters, graph breaks": 4,
    # The host updates each of five units.
    "train step, stage 3, parameters": 7,
    "train step, stage 3, parameters, update fails": 8,
    # It may look at the state between steps.
    "train step, stage 3, optimizer": 1,
    "train step, stage 3, optimizer, loading": 1,
    "train step, stage 3, optimizer, gather fails": 1,
    "train step, stage 3, optimizer, update fails": 1,
    # The same of a pipeline, whose ranks have three units and two.
    "pipeline, parameters": (3, 2),
    "pipeline, parameters, gradients summed": (3, 2),
    "pipeline, optimizer": 1,
    # Each of two evaluations, and what writes to shards.
    "stage 3, parameters, evaluating": 4,
    "one rank, parameters": 2,
    # Copies are compared once a version counter has moved.
    "train step, stage 3, writing": 1,
    # GradScaler asks the device whether a gradient has overflowed.
    "stage 3, float16, scaling": 1,
    "stage 3, float16, scaling, chunks": 1,
    "hfsdp, float16, scaling": 1,
    # Ranks of a pipeline compare their scales, too.
    "pipeline, float16, scaling": 2,
}
"""How often the host waits for the device in one step, where it does; where ranks differ, of each."""


@pytest.mark.filterwarnings("ignore")
@quickly("name", list(SCENARIOS), QUICK, slow=list(SCENARIOS)[::6])
def test_everything_is_ordered(gpus: Ranks, name: str) -> None:
    for rank, report in enumerate(gpus.run(SCENARIOS[name].world or 4, scenarios.run, name)):
        assert report.findings == []
        waits = WAITS.get(name, 0)
        assert sum(report.waits.values()) == (waits if isinstance(waits, int) else waits[rank]), report.waits
        # By one group, a message can stand behind another one for which the other end waits for good.
        ways = [{"send", "recv"} & {call.split()[0] for call in calls} for calls in report.calls]
        assert all(len(both) < 2 for both in ways), ways


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@quickly(
    "names",
    [["activations", "optimizer", "stage 2, gpipe"], ["parameters", "stage 1, v of zero bubbles"]],
    [["parameters", "stage 1, v of zero bubbles"]],
)
def test_pipelines_give_the_same_losses_wherever_things_are(gpus: Ranks, names: list[str]) -> None:
    plain = gpus.run(2, scenarios.losses, "pipeline, stage 3")
    assert plain[0] == plain[1]
    assert len({*plain[0]}) > 1
    for name in names:
        assert gpus.run(2, scenarios.losses, f"pipeline, {name}") == plain, name


@pytest.mark.slow
@quickly("world", [8, 64, 256], [8])
def test_a_step_launches_no_more_in_a_larger_world(gpus: Ranks, world: int) -> None:
    """It launches what one rank alone does, and what sends and packs, of which it has no more than FSDP2."""
    (ours,), (theirs,) = gpus.run(world, scenarios.run, "stage 3"), gpus.run(world, scenarios.run_fsdp2)
    ((smallest,), (alone,)) = (gpus.run(few, scenarios.run, "stage 3") for few in (4, 1))
    assert theirs.findings == ours.findings == []
    assert theirs.waits == ours.waits == {}
    assert ours.launches == smallest.launches
    assert sum(ours.launches.values()) == sum(alone.launches.values()) + ours.messages + ours.packing
    assert sum(ours.launches.values()) <= sum(theirs.launches.values())
    assert ours.messages <= theirs.messages
    assert ours.packing <= theirs.packing


@pytest.mark.slow
def test_a_parameter_that_is_large_costs_no_message_of_its_own(gpus: Ranks) -> None:
    (wide,), (narrow,) = gpus.run(4, scenarios.run, "stage 3, large"), gpus.run(4, scenarios.run, "stage 3")
    assert wide.findings == []
    assert wide.messages == narrow.messages


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 256])
def test_a_piece_is_packed_by_a_few_kernels_in_any_world(gpus: Ranks, world: int) -> None:
    pieces, whole = (gpus.run(world, scenarios.run, name)[0] for name in ("stage 3, large, pieces", "stage 3, large"))
    assert sum(pieces.launches.values()) - sum(whole.launches.values()) <= 5 * pieces.messages


@pytest.mark.slow
@quickly("name", ["stage 3", "train step, stage 3"], ["train step, stage 3"])
def test_ranks_that_are_there_ask_for_the_same(gpus: Ranks, name: str) -> None:
    one, other = gpus.run(2, scenarios.run, name)
    assert one.findings == other.findings == []
    assert one.waits == other.waits == {}
    assert one.calls == other.calls


@pytest.mark.slow
def test_gathers_wait_for_no_reductions(gpus: Ranks) -> None:
    """They have a group of their own, whose stream has a high priority."""
    assert gpus.run(2, _groups)[0] == {"all_gather": [True], "reduce_scatter": [False]}


def _groups(rank: int) -> dict[str, list[bool]]:
    """For each collective of sharded training, the priorities of the groups that were asked for it."""
    from tests.simulated import nccl

    scenarios.run(rank, "stage 3")
    made = [(group.options.is_high_priority_stream, "".join(group.calls())) for group in nccl.ProcessGroupNCCL.made]
    return {kind: [high for high, calls in made if kind in calls] for kind in ("all_gather", "reduce_scatter")}
