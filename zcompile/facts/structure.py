"""Facts about the structure of a program: values, phases, units, regions."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Any

from torch import fx

from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.operation import Operation, Phase, data, given_to, keywords_of, op_of, takes
from zcompile.ir.ops import (
    FUNCTIONS,
    NAMES,
    Accumulate,
    AllGather,
    Arena,
    Averaging,
    Call,
    Compute,
    GatherInside,
    GatherOutside,
    Group,
    Input,
    Item,
    Kind,
    Parameter,
    Placeholder,
    Reduce,
    ReduceOutside,
    Results,
    Shards,
    Sum,
    SumAverages,
    Update,
    WaitFetch,
    WaitGather,
    WaitReduce,
    WaitSecondary,
)
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.ir.tensor_type import TensorType

WAITS = (WaitGather, WaitSecondary, WaitReduce, WaitFetch)
_OF_UNITS = (Shards, AllGather, WaitGather, GatherOutside, WaitSecondary)


def _well_formed(program: Program) -> Iterator[Violation]:
    yield from _named(program)
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield Violation(node, f"{label(node)} uses {source.name} before it is there")
        seen.add(node)
        yield from _arguments_valid(program, node)
        yield from _text_matches_data(node)
    for value in program.results.outputs:
        if isinstance(value, fx.Node) and isinstance(data(value).op, _OF_UNITS):
            yield Violation(value, f"{value.name} is returned, but is not a value of the model's")
    for value in program.results.reduced:
        if not isinstance(data(value).op, (WaitReduce, SumAverages, Accumulate)):
            yield Violation(value, f"{value.name} is returned as reduced gradients, which it is not")


def _named(program: Program) -> Iterator[Violation]:
    """Names of values and regions must be unique and not reserved, as the text that runs refers to them by name."""
    taken: set[str] = set()
    for node in (node for node in program.graph.nodes if data(node).op.gives):
        name = node.name
        if name in taken:
            yield Violation(node, f"two lines are called {name}; want a name of its own for each")
        if not name.isidentifier() or keyword.iskeyword(name) or name in NAMES or name in program.regions:
            yield Violation(node, f"{name!r} cannot name a value: it means something else in a program's text")
        taken.add(name)
    for name, region in program.regions.items():
        if region.name != name:
            yield Violation(None, f"the region {name} calls itself {region.name}")
        yield from _calls_only_operations(region)


def _calls_only_operations(region: Region) -> Iterator[Violation]:
    """Regions may only call operations: their text has no other nodes."""
    for node in region.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            yield Violation(None, f"{region.name} has {node.name}, a {node.op}, which its text has not")


def _arguments_valid(program: Program, node: fx.Node) -> Iterator[Violation]:
    """Lines must have valid arguments, and name units, parameters and regions that exist."""
    op, given = data(node).op, given_to(node)
    if op.takes is not None and not (takes(type(op), given) and all(map(_lists_gradients, given))):
        yield Violation(node, f"{node.name} is given {list(node.args)}, which a {type(op).__name__} does not take")
    unit = getattr(op, "unit", None)
    if unit is not None and unit not in {known.name for known in program.layout.units}:
        yield Violation(node, f"{node.name} names the unit {unit!r}, which is not there")
    elif isinstance(op, (Sum, SumAverages, Reduce, Accumulate, WaitReduce, ReduceOutside, Update)):
        yield from _mistaken_gradients(program, node, op)
        if isinstance(op, ReduceOutside):
            yield from _mistaken_outside(program, node, op)
    elif isinstance(op, (AllGather, GatherOutside)):
        yield from _mistaken_gather(program, node, op)
    elif isinstance(op, Call):
        yield from _mistaken_call(program, node, op)
    elif isinstance(op, Item) and program.regions:
        yield from _mistaken_item(program, node, op)


def _mistaken_outside(program: Program, node: fx.Node, op: ReduceOutside) -> Iterator[Violation]:
    """Averages along the outer axis must be of inner averages of the same parameters."""
    shards, averages, group = given_to(node)
    if shards != Shards(op.unit):
        yield Violation(node, f"{node.name} names the unit {op.unit}, and is given the shards of {shards.unit}")
    known = WaitReduce(op.unit, op.params), SumAverages(op.unit, op.params)
    if averages not in known or group != Group(op.axis):
        yield Violation(node, f"{node.name} averages {op.params} over {op.axis}, and is given {averages} over {group}")
    if op.wire is not (wanted := program.layout.unit(op.unit).outer_dtype):
        yield Violation(node, f"{node.name} sends averages of {op.unit} as {op.wire}; want {wanted}")
    yield from _mistaken_axis(program, node, op.axis)
    if op.scatter is not program.layout.has_secondary:
        gets, wants = ("its part", "all") if op.scatter else ("all", "its part")
        yield Violation(node, f"{node.name} gives each rank outside {gets} of {op.unit}; want {wants}")


def _mistaken_axis(program: Program, node: fx.Node, axis: str) -> Iterator[Violation]:
    if axis not in [one.name for one in program.layout.outside]:
        yield Violation(node, f"{node.name} sends over {axis}, which is not the outer one of two axes of data")


def _mistaken_gather(program: Program, node: fx.Node, op: AllGather | GatherOutside) -> Iterator[Violation]:
    """Primary shards must be gathered along the outer axis, and the resulting secondary shards along the inner one."""
    layout, (_, *others) = program.layout, given_to(node)
    if isinstance(op, GatherOutside):
        yield from _mistaken_axis(program, node, op.axis)
        if others != [Group(op.axis)]:
            yield Violation(node, f"{node.name} gathers over {op.axis}, and is given {others}")
        if op.keep is not layout.keeps_secondary:
            problem = "keeps" if op.keep else "does not keep"
            yield Violation(node, f"{node.name} {problem} secondary shards of {op.unit} beyond the step")
        if op.wire is not (wire := layout.unit(op.unit).outer_gather_dtype):
            yield Violation(node, f"{node.name} sends shards of {op.unit} as {op.wire}; want {wire}")
    elif isinstance(op, AllGather):
        if (wanted := layout.has_secondary and layout.unit(op.unit).is_sharded) is not isinstance(op, GatherInside):
            source = "secondary shards" if wanted else "shards, of which there are no secondary ones"
            yield Violation(node, f"{node.name} gathers {op.unit} from what are not its {source}")
        elif others and others != [WaitSecondary(op.unit)]:
            yield Violation(node, f"{node.name} gathers {op.unit}, and is given secondary shards of {others[0].unit}")


def _lists_gradients(given: Any) -> bool:
    """Return True for a list of values and None, and for an argument that is not a list."""
    return isinstance(given, (Operation, str)) or all(item is None or isinstance(item, fx.Node) for item in given)


def _mistaken_gradients(
    program: Program,
    node: fx.Node,
    op: Sum | SumAverages | Reduce | Accumulate | WaitReduce | ReduceOutside | Update,
) -> Iterator[Violation]:
    params = [param.name for param in program.layout.unit(op.unit).params]
    if unknown := set(op.params).difference(params):
        yield Violation(node, f"{node.name} names {min(unknown)!r}, which {op.unit} does not have")
    for index, given in enumerate(given_to(node)[1:]):
        if isinstance(given, (list, tuple)) and len(given) != len(params):
            yield Violation(node, f"{node.name} is given {len(given)} gradients; {op.unit} has {len(params)}")
        if not isinstance(op, (Sum, SumAverages, Reduce)) or not isinstance(given, (Sum, SumAverages, WaitReduce)):
            continue
        lacks = index > 0 and {*given.params} < {*op.params}  # what is added may lack some parameters
        if given.unit != op.unit or (given.params != op.params and not lacks):
            problem = f"is of {op.params} of {op.unit}, and is given gradients of {given.params} of {given.unit}"
            yield Violation(node, f"{node.name} {problem}")
    started = given_to(node)[0] if isinstance(op, WaitReduce) else None
    if isinstance(started, Averaging) and (started.unit, started.params) != (op.unit, op.params):
        yield Violation(node, f"{node.name} is of {op.unit}, and waits for {node.all_input_nodes[0].name}")


def _mistaken_call(program: Program, node: fx.Node, op: Call) -> Iterator[Violation]:
    """Calls must have as many arguments as their region takes; `_mistaken_arguments` checks types."""
    region, given = program.regions.get(op.region), node.args[1:]
    if region is None or not node.args or not all(isinstance(arg, fx.Node) for arg in given):
        yield Violation(node, f"{node.name} calls {op.region}, which is not there or takes other arguments")
        return
    wanted = 1 + max((argument for argument, _ in region.takes), default=-1)
    full = [argument for argument, item in region.takes if item is not None]
    if len(given) != wanted or any(argument >= len(op.units) for argument in full):
        yield Violation(node, f"{label(node)} is given {len(given)} arguments; it takes {wanted}")
    for argument, item in region.takes:
        if (
            item is not None
            and argument < len(op.units)
            and item >= len(program.layout.unit(op.units[argument]).params)
        ):
            yield Violation(node, f"{label(node)} takes parameter {item} of {op.units[argument]}, which has fewer")


def _mistaken_item(program: Program, node: fx.Node, op: Item) -> Iterator[Violation]:
    """An item must come right after its call, and be a result that the region has."""
    sources = node.all_input_nodes
    found = data(sources[0]).op if len(sources) == 1 else None
    if not isinstance(found, Call) or found.region not in program.regions:
        names = [source.name for source in sources]
        yield Violation(sources[0] if sources else node, f"{node.name} is a result of {names}, which is not a call")
        return
    (call,) = sources
    if op.index >= len(program.regions[found.region].outputs):
        yield Violation(node, f"{node.name} is result {op.index} of {label(call)}, which has fewer")
    elif node.prev is not call and not (isinstance(data(node.prev).op, Item) and call in node.prev.all_input_nodes):
        yield Violation(node, f"{node.name} does not follow {call.name}, whose result it is")


def _text_matches_data(node: fx.Node) -> Iterator[Violation]:
    """A node's target and arguments, which the text is printed from, must match its data, which facts read."""
    op = data(node).op
    right = not op.functions or (node.target is FUNCTIONS[op.function] and _written(node) == keywords_of(op))
    if not right or (isinstance(op, Call) and node.args[0] != op.region):
        yield Violation(node, f"{label(node)} is written otherwise than its data says: {op}")


def _written(node: fx.Node) -> dict[str, Any]:
    """Return the keyword arguments in a line's text; for the arena, only the byte range."""
    match node.kwargs.get("at"):
        case (fx.Node() as arena, start, stop) if isinstance(data(arena).op, Arena):
            return {**node.kwargs, "at": (start, stop)}
    return dict(node.kwargs)


def _phases_split(program: Program) -> Iterator[Violation]:
    derived = derived_values(program)
    seen_backward = False
    for node in program.graph.nodes:
        meta = data(node)
        if isinstance(meta.op, Placeholder):
            is_tangent = isinstance(meta.op, Input) and meta.op.kind is Kind.TANGENT
            if (meta.phase is Phase.BACKWARD) != is_tangent:
                yield Violation(node, f"{node.name} is said to be given to the {meta.phase}")
            continue
        if isinstance(meta.op, (Item, *WAITS)) and meta.phase is not data(node.all_input_nodes[0]).phase:
            source = node.all_input_nodes[0]
            yield Violation(node, f"{node.name} belongs to the {meta.phase}, {label(source)} to the other phase")
        seen_backward |= meta.phase is Phase.BACKWARD
        if seen_backward and meta.phase is Phase.FORWARD:
            yield Violation(node, f"{node.name} belongs to the forward but is in the backward")
        for source in node.all_input_nodes:
            crosses = data(source).phase is Phase.FORWARD and meta.phase is Phase.BACKWARD
            if crosses and source in derived and not isinstance(meta.op, Results):
                yield Violation(node, f"{source.name} is derived from a parameter, yet saved for {node.name}")
            if data(source).phase is Phase.BACKWARD and meta.phase is Phase.FORWARD:
                yield Violation(node, f"{node.name} belongs to the forward and reads {source.name} of the backward")


def _units_assigned(program: Program) -> Iterator[Violation]:
    derived = derived_values(program)
    for node in program.nodes(Compute):
        for source in node.all_input_nodes:
            op = data(source).op
            if isinstance(op, Parameter) and node not in derived and not data(node).unit:
                yield Violation(node, f"{node.name} reads {op.name} and belongs to no unit")


def _regions_outlined(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Compute, Parameter):
        yield Violation(node, f"{node.name} is outside a region")
    for node in program.nodes(Call):
        op = op_of(node, Call)
        if op.region not in program.regions:
            yield Violation(node, f"{node.name} calls {op.region}, which is not there")
        else:
            yield from _mistaken_arguments(program, node, op)


def _mistaken_arguments(program: Program, node: fx.Node, op: Call) -> Iterator[Violation]:
    """Arguments of a region must have the shape and dtype with which it was traced."""
    region = program.regions[op.region]
    for number, (inner, (argument, item)) in enumerate(
        zip(region.graph.find_nodes(op="placeholder"), region.takes, strict=True)
    ):
        wanted, given = data(inner).type, node.args[1 + argument]
        wanted = wanted if region.rows is None else region.rows.whole(wanted, region.rows.takes[number])
        if wanted is None or not isinstance(given, fx.Node):
            continue
        if item is None:
            name, type_ = given.name, data(given).type
        else:
            param = program.layout.unit(op.units[argument]).params[item]
            name, type_ = param.name, TensorType.make(param.full_dtype, param.shape)
        if type_ is None or (type_.shape, type_.dtype) != (wanted.shape, wanted.dtype):
            yield Violation(node, f"{label(node)} takes {name} where it was traced with {wanted}")


WELL_FORMED = Fact("values defined before use, operations written as meant", _well_formed)
PHASES_SPLIT = Fact("phases split, parameters read again and never saved", _phases_split)
UNITS_ASSIGNED = Fact("reads of parameters assigned to units", _units_assigned)
REGIONS_OUTLINED = Fact("compute outlined into regions", _regions_outlined)
