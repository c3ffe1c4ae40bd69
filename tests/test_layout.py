"""How parameters are divided among ranks and gathered in units, as properties over many shapes and programs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zcompile
from tests.models import GPT, ConvNet, OddMLP
from tests.passes.programs import CHAIN
from zcompile import ModelError, OptionError, ParseError, Program, facts
from zcompile.ir.axis import Axis, AxisKind, axes_of
from zcompile.ir.layout import STAGES, Layout, Param, Unit
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import AllGather, Call, Release, WaitGather
from zcompile.ir.spelling import identifier
from zcompile.model.units import find_blocks, make_layout, match_blocks
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.pack_small import pack_small
from zcompile.passes.schedule_prefetch import schedule_prefetch
from zcompile.runtime import shards as runtime_shards

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
worlds = st.integers(1, 9)
shapes = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)

# -- shards -----------------------------------------------------------------------------------------------------------


def chunks(shape: tuple[int, ...], world: int) -> list[torch.Tensor]:
    """What each rank has of a parameter as torch.chunk divides; ranks beyond the last chunk have none."""
    found = list(torch.arange(math.prod(shape)).view(shape).chunk(world))
    return found + [found[0][:0]] * (world - len(found))


@given(shapes, worlds)
def test_ranks_keep_the_rows_that_chunk_gives_them(shape: tuple[int, ...], world: int) -> None:
    param = Param("w", shape, torch.float32, shards=world)
    whole = torch.arange(math.prod(shape)).view(shape)
    for rank, want in enumerate(chunks(shape, world)):
        start, stop = param.shard_rows(rank)
        assert torch.equal(whole[start:stop], want)


@given(shapes, worlds)
def test_padding_stands_at_the_tail_only(shape: tuple[int, ...], world: int) -> None:
    param = Param("w", shape, torch.float32, shards=world)
    padded = torch.full((world, param.shard_numel), -1)
    for rank, rows in enumerate(chunks(shape, world)):
        padded[rank, : rows.numel()] = rows.reshape(-1)
    assert param.padded_numel == padded.numel()
    assert torch.equal(padded.view(-1)[: param.numel], torch.arange(param.numel)), "gathered, the whole is its head"
    assert (padded.view(-1)[param.numel :] == -1).all()


@given(shapes, worlds)
def test_a_world_that_divides_the_rows_pads_nothing(shape: tuple[int, ...], world: int) -> None:
    param = Param("w", (shape[0] * world, *shape[1:]), torch.float32, shards=world)
    assert param.padded_numel == param.numel
    assert param.padded_bytes == param.nbytes


@given(st.lists(st.integers(0, 12), max_size=3).map(tuple), st.integers(0, 8))
def test_every_rank_keeps_the_whole_of_a_parameter_that_is_not_sharded(shape: tuple[int, ...], rank: int) -> None:
    param = Param("w", shape, torch.float32, shards=0)
    assert param.shard_rows(rank) == (0, shape[0] if shape else 1)
    assert param.shard_numel == param.padded_numel == param.numel


@given(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=6), worlds)
def test_a_gather_brings_the_padded_sharded_parameters(found: list[tuple[tuple[int, ...], bool]], world: int) -> None:
    params = [Param(f"p{i}", shape, torch.float32, shards=world * sharded) for i, (shape, sharded) in enumerate(found)]
    unit = Unit("u", tuple(params))
    moved = sum(4 * p.shard_numel * world for p in params if p.shards)
    layout = Layout((unit,), STAGES[3], axes_of(world))
    assert layout.gathered_bytes("u") == (moved if world > 1 else 0), "alone, the shard is the parameter already"
    assert replace(layout, away=True).gathered_bytes("u") == moved + sum(p.nbytes for p in params if not p.shards)
    assert unit.messages == tuple((index,) for index in range(len(params))), "unpacked, each travels alone"


@given(st.lists(st.integers(1, 40000), min_size=1, max_size=6), st.sampled_from(DTYPES), worlds)
def test_large_shards_begin_where_kernels_load_many_elements_at_once(
    widths: list[int], dtype: torch.dtype, world: int
) -> None:
    params = tuple(Param(f"w{i}", (world, width), dtype, shards=world) for i, width in enumerate(widths))
    sizes, offsets = runtime_shards._sizes(Unit("u", params), 0)
    assert all(offsets[param.name] * dtype.itemsize % 16 == 0 for param in params if not param.is_small)
    ends = [offsets[param.name] + param.shard_numel for param in params]
    assert all(offsets[after.name] >= end for after, end in zip(params[1:], ends, strict=False))
    assert sizes[dtype] == ends[-1]
    for end, small in zip(ends, params[1:], strict=False):
        assert not small.is_small or offsets[small.name] == end, "what travels together lies together"


# -- units ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Other(Block):
    pass


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(2)), "norm": nn.LayerNorm(2)})
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Other() for _ in range(3)), "norm": nn.LayerNorm(2)})
        self.head = nn.Linear(2, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList([Block(), Block()])


def layout_of(model: nn.Module, stage: int = 3, world: int = 2, units: list[str] | None = None) -> Layout:
    return make_layout(model, STAGES[stage], axes_of(world), units)


def params_of(layout: Layout) -> dict[str, list[str]]:
    return {unit.name: sorted(param.name for param in unit.params) for unit in layout.units}


def test_repeated_children_of_a_list_are_blocks() -> None:
    assert find_blocks(GPT(layers=3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert find_blocks(nn.Sequential(Block(), nn.ReLU(), Block())) == ["0", "2"]


def test_both_lists_of_an_encoder_decoder_have_blocks() -> None:
    model = EncoderDecoder()
    assert find_blocks(model) == [
        *(f"encoder.layers.{i}" for i in range(2)),
        *(f"decoder.layers.{i}" for i in range(3)),
    ]
    assert list(params_of(layout_of(model))) == [
        "embed",
        "encoder.layers.0",
        "encoder.layers.1",
        "encoder.norm",
        "decoder.layers.0",
        "decoder.layers.1",
        "decoder.layers.2",
        "head",
    ], "what stands between blocks is a unit named after its largest module"
    assert params_of(layout_of(model))["head"] == [
        "decoder.norm.bias",
        "decoder.norm.weight",
        "head.bias",
        "head.weight",
    ]


def test_a_child_that_is_not_repeated_is_no_block() -> None:
    assert find_blocks(nn.ModuleList([Block(), Other()])) == []
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_the_outermost_repetition_wins() -> None:
    nested = nn.ModuleList(nn.Sequential(*(Block() for _ in range(2))) for _ in range(2))
    assert find_blocks(nested) == ["0.0", "0.1", "1.0", "1.1"], "a container is no block"

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Block() for _ in range(2))

    assert find_blocks(nn.ModuleList(Layer() for _ in range(2))) == ["0", "1"]


def test_a_tied_parameter_belongs_to_the_unit_that_has_it_first() -> None:
    assert params_of(layout_of(Tied())) == {
        "embed": ["embed.weight"],
        "blocks.0": ["blocks.0.inner.bias", "blocks.0.inner.weight"],
        "blocks.1": ["blocks.1.inner.bias", "blocks.1.inner.weight"],
    }


def test_parameters_of_the_root_make_a_unit_and_scalars_stay_whole() -> None:
    layout = layout_of(Rooted())
    assert params_of(layout)["shift"] == ["scale", "shift"]
    assert {param.name: param.shards for param in layout.unit("shift").params} == {"shift": 2, "scale": 0}
    assert [param.name for param in layout.unit("shift").params] == ["shift", "scale"], "whole ones come last"


@pytest.mark.parametrize("model", [GPT, OddMLP, ConvNet, EncoderDecoder, Tied, Rooted])
@pytest.mark.parametrize("stage", range(4))
def test_every_parameter_is_in_one_unit(model: type[nn.Module], stage: int) -> None:
    made = model()
    layout = layout_of(made, stage)
    assert sorted(param.name for param in layout.params) == sorted(dict(made.named_parameters()))
    assert len({identifier(unit.name) for unit in layout.units}) == len(layout.units), "names stay apart in a program"
    assert all((param.shards > 0) <= STAGES[stage].optimizer_sharded for param in layout.params)


def test_patterns_choose_the_units() -> None:
    layout = layout_of(EncoderDecoder(), units=["encoder", "decoder.layers.[0-9]"])
    assert list(params_of(layout)) == ["embed", "encoder", *(f"decoder.layers.{i}" for i in range(3)), "head"]
    assert match_blocks(GPT(layers=2), ["blocks.*.mlp", "tokens"]) == ["tokens", "blocks.0.mlp", "blocks.1.mlp"]


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError) as caught:
        layout_of(GPT(layers=2), units=["block.0"])
    assert caught.value.problem == "'block.0' matches no module with parameters"
    assert caught.value.fix.startswith("did you mean 'blocks.0'?")


def test_a_pattern_that_matches_only_modules_without_parameters_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'blocks\.\*\.mlp\.1' matches no module with parameters"):
        layout_of(GPT(layers=2), units=["blocks.*.mlp.1"])


def test_patterns_that_match_a_module_and_its_part_are_refused() -> None:
    with pytest.raises(OptionError, match=r"'blocks\.0\.mlp' is inside 'blocks\.0'"):
        layout_of(GPT(layers=2), units=["blocks.[0-9]", "blocks.0.mlp"])


def test_two_units_of_one_name_are_refused() -> None:
    with pytest.raises(ModelError, match="two units have one name"):
        Layout((Unit("a", ()), Unit("a", ())))


@pytest.mark.slow
@given(st.text(min_size=1, max_size=8))
def test_every_name_has_an_identifier(name: str) -> None:
    assert identifier(name).isidentifier() or not name.isascii()


# -- messages ---------------------------------------------------------------------------------------------------------

params = st.builds(
    lambda large, dtype, sharded: ((1024, 1024) if large else (8,), dtype, sharded),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.booleans(),
)


@given(st.lists(params, min_size=1, max_size=10), st.integers(1, 4))
def test_messages_hold_every_parameter_once_in_runs_of_one_kind(
    found: list[tuple[tuple[int, ...], torch.dtype, bool]], world: int
) -> None:
    made = [Param(f"p{i}", shape, dtype, shards=world * sharded) for i, (shape, dtype, sharded) in enumerate(found)]
    program = chain([])
    unit = Unit("a", tuple(made))
    packed = pack_small(replace(program, layout=replace(program.layout, units=(unit,), axes=axes_of(world))))
    messages = packed.layout.units[0].messages
    assert [index for message in messages for index in message] == list(range(len(made)))
    for message in messages:
        kinds = {(made[i].dtype, bool(made[i].shards)) for i in message}
        assert len(kinds) == 1
        assert len(message) == 1 or all(made[i].is_small for i in message)
    assert not list(facts.MESSAGES_PACKED.violations(packed))


@pytest.mark.parametrize("model", [GPT, OddMLP, ConvNet])
def test_small_neighbours_of_a_real_model_share_one_message(model: type[nn.Module]) -> None:
    program = chain([])
    packed = pack_small(replace(program, layout=layout_of(model())))
    for unit in packed.layout.units:
        kinds = [
            (unit.params[m[0]].dtype, bool(unit.params[m[0]].shards), unit.params[m[0]].is_small) for m in unit.messages
        ]
        small = [kind for kind in kinds if kind[2]]
        assert len(small) == len(set(small)), "one message for each kind"


# -- prefetch ---------------------------------------------------------------------------------------------------------


def chain(forward: list[int], backward: list[int] | None = None, units: int = 0) -> Program:
    """A program that calls a region with these units one after another, in the forward and in the backward."""
    names = [f"u{index}" for index in range(units)]
    listed = "".join(f'    "{name}": [\n        "{name}.weight f32[4, 4]",\n    ],\n' for name in names)
    region = CHAIN.partition("\n\n\n")[2].partition("\n\n\n")[0]
    head = f'axes = {{"dp": "shard 2"}}\nstage = 3\nunits = {{\n{listed}}}\npacked = {{\n}}\n\n\n{region}\n'
    text = f"{head}\n\n{_phase('forward', 'x', forward, names)}"
    if backward is not None:
        text += f"\n\n{_phase('backward', 'dy', backward, names)}"
    return zcompile.parse(text)


def _phase(phase: str, first: str, uses: list[int], names: list[str]) -> str:
    lines = [f"        {name},  # 1 parameter unit {name}" for name in names]
    lines.append(f"        {first},  # f32[8, 4]{' tangent' if phase == 'backward' else ''}")
    value, body = first, []
    for index, use in enumerate(uses):
        body.append(f"    {phase}_{index} = region_0({names[use]}, {value})  # f32[8, 4] {names[use]}")
        value = f"{phase}_{index}"
    unboxed = "\n".join(lines)
    statements = "".join(f"{line}\n" for line in body)
    return f"def {phase}(box):\n    (\n{unboxed}\n    ) = unbox(box)\n{statements}    return [{value}], []\n"


uses = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def most_full(program: Program) -> int:
    """The most units that are full or in flight at once."""
    live, most = 0, 0
    for node in program.nodes(AllGather, Release):
        live += 1 if isinstance(data(node).op, AllGather) else -1
        most = max(most, live)
    return most


@pytest.mark.slow
@settings(max_examples=60)
@given(uses, uses, st.integers(0, 4))
def test_no_more_units_are_full_than_the_prefetch_allows(
    forward: list[int], backward: list[int], prefetch: int
) -> None:
    program = chain(forward, backward, 6)
    scheduled = schedule_prefetch(insert_gathers(program), prefetch=prefetch)
    assert most_full(scheduled) <= prefetch + 1
    zcompile.verify(
        scheduled,
        (
            facts.GATHERED_BEFORE_USE,
            facts.RELEASED_ONCE,
            facts.OWNED,
            facts.VOLUME_RIGHT,
            facts.PHASES_SPLIT,
            facts.units_bounded(prefetch),
        ),
        "after schedule_prefetch",
    )
    scheduled.graph.lint()
    assert_every_call_reads_its_unit_while_it_is_full(scheduled)


def assert_every_call_reads_its_unit_while_it_is_full(program: Program) -> None:
    """An interpreter of its own, so that the facts are not judged by themselves."""
    started: set[str] = set()
    full: dict[str, str] = {}
    for node in program.graph.nodes:
        match data(node).op:
            case AllGather(unit):
                assert node.name not in started
                started.add(node.name)
            case WaitGather(unit):
                assert node.args[0].name in started  # type: ignore[union-attr]
                full[node.name] = unit
            case Release():
                del full[node.args[0].name]  # type: ignore[union-attr]
            case Call(_, units):
                assert [full[arg.name] for arg in node.args[1 : 1 + len(units)]] == list(units)  # type: ignore[union-attr]
    assert not full, "all are released at the end"


@settings(max_examples=40)
@given(uses, st.integers(0, 4))
def test_prefetch_moves_gathers_and_nothing_else(forward: list[int], prefetch: int) -> None:
    gathered = insert_gathers(chain(forward, [], 6))
    scheduled = schedule_prefetch(gathered, prefetch=prefetch)

    def others(program: Program) -> list[str]:
        return [node.name for node in program.graph.nodes if not isinstance(data(node).op, AllGather)]

    assert others(scheduled) == others(gathered)
    order = [op_of(node, AllGather).unit for node in scheduled.nodes(AllGather)]
    assert order == [op_of(node, AllGather).unit for node in gathered.nodes(AllGather)], "in the order of their uses"
    assert not list(facts.units_bounded(prefetch).violations(scheduled))


# -- axes -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 4))
def test_axes_part_the_ranks_of_a_mesh(world: int, tensor_parallel: int) -> None:
    mesh = torch.arange(world * tensor_parallel).view(world, tensor_parallel)
    axes = axes_of(world, tensor_parallel)
    for rank in range(world * tensor_parallel):
        place = divmod(rank, tensor_parallel)
        assert list(axes[0].ranks(rank)) == mesh[:, place[1]].tolist()
        assert tensor_parallel == 1 or list(axes[1].ranks(rank)) == mesh[place[0]].tolist()


@pytest.mark.slow
@given(st.text(), st.sampled_from(AxisKind), st.integers(1, 99), st.integers(1, 99))
def test_an_axis_is_read_as_it_is_printed(name: str, kind: AxisKind, size: int, stride: int) -> None:
    axis = Axis(name, kind, size, stride)
    assert Axis.parse(name, str(axis)) == axis


@pytest.mark.parametrize(
    ("axes", "found"),
    [
        ('{"dp": "shards 2"}', "'shards 2' is not an axis, such as 'shard 4, stride 2'"),
        ('{"dp": "shard 0"}', "'shard 0' is not an axis, such as"),
        ('{"tp": "tensor 2"}', "want one that shards"),
        ('{"a": "shard 2", "b": "shard 2"}', "want one that shards"),
    ],
)
def test_what_are_no_axes_is_refused(axes: str, found: str) -> None:
    with pytest.raises(ParseError) as caught:
        zcompile.parse(f"axes = {axes}\nstage = 3\n")
    assert str(caught.value).startswith(f"axes: {found}")


def test_a_function_chooses_the_units() -> None:
    def is_mlp(path: str, module: nn.Module) -> bool:
        return path.endswith("mlp") and isinstance(module, nn.Sequential)

    assert match_blocks(GPT(layers=2), is_mlp) == ["blocks.0.mlp", "blocks.1.mlp"]
    layout = layout_of(GPT(layers=2), units=lambda path, module: isinstance(module, nn.Embedding))
    assert list(params_of(layout))[:2] == ["tokens", "positions"]
    with pytest.raises(OptionError, match="true for no module"):
        layout_of(GPT(layers=2), units=lambda path, module: False)
    with pytest.raises(OptionError, match=r"is inside 'blocks\.0'"):
        layout_of(GPT(layers=2), units=lambda path, module: path.startswith("blocks."))


def test_what_travels_together_is_a_message() -> None:
    params = (
        Param("a", (4, 2), torch.float32, shards=2, outer_gather_dtype=torch.bfloat16),
        Param("b", (3,), torch.float32, shards=2, outer_gather_dtype=torch.bfloat16),
        Param("c", (2,), torch.float32, reduction_dtype=torch.bfloat16),
    )
    unit = Unit("u", params, messages=((0, 1), (2,)))
    (gathered,) = unit.sent(None, None)
    assert (gathered.places, gathered.numel, gathered.nbytes) == ((0, 1), 8 + 4, 48), "c is whole on every rank"
    assert unit.sent(None, None) is unit.sent(None, None), "it is computed once"
    (outside,) = unit.sent(None, None, inside=2, wire=torch.bfloat16)
    assert (outside.numel, outside.gathered_bytes(2)) == (6, 2 * (4 + 2) * 2)
    averaged = unit.sent(("b", "c"), torch.bfloat16)
    assert [(one.places, one.dtype) for one in averaged] == [((1,), torch.float32), ((2,), torch.bfloat16)]
    assert [one.averaged_bytes(2, scatters=one.is_sharded) for one in averaged] == [16, 2 * 4]
    assert [one.places for one in unit.sent(("a", "b"), None, packed=False)] == [(0,), (1,)]
