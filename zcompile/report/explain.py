"""The text of `explain()`: an overview of a compiled model for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table
from torch import fx

from zcompile.cost.memory import model_state, most_kept, peak_bytes
from zcompile.cost.text_console import TextConsole
from zcompile.ir.layout import Layout, cost_of
from zcompile.ir.operation import Role, data, op_of
from zcompile.ir.ops import AllGather, Call, Communication, GatherAhead, Release, Send
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_collective
from zcompile.ir.tensor_type import human_bytes
from zcompile.torch_internals.dynamo import FailOnRecompileLimitHit


@dataclass(frozen=True, slots=True)
class Break:
    """A graph break: the line that cannot be traced, and a module that runs as plain Python because of it."""

    module: str
    where: str
    reason: str

    @classmethod
    def of(cls, path: str, kind: str, error: Exception) -> Break:
        """Make a break from an error of torch.compile while it traced the module at `path`, of class `kind`."""
        name = f"{path} ({kind})" if path else kind
        if isinstance(error, FailOnRecompileLimitHit):
            problem = "it was traced as often as torch._dynamo.config.recompile_limit allows, because Python numbers"
            return cls(name, name, f"{problem} or kinds of arguments change with each call: TORCH_LOGS=recompiles")
        stack = getattr(error, "real_stack", None) or ()
        where = f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}" if stack else "an unknown line"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        explanation = [line for line in lines[1:] if line.startswith("Explanation:")]
        return cls(name, where, " ".join([*lines[:1], *explanation[:1]]))


def explain_breaks(breaks: Sequence[Break]) -> str:
    """List the graph breaks: the line, the reason, and the modules that run as plain Python."""
    modules: dict[tuple[str, str], list[str]] = {}
    for found in breaks:
        modules.setdefault((found.where, found.reason), []).append(found.module)
    return "\n".join(
        f"graph break at {where}\n  {reason}\n"
        f"  So these modules run as plain Python, and their submodules as separate programs: {', '.join(names)}"
        for (where, reason), names in modules.items()
    )


def explain(
    layout: Layout,
    programs: Sequence[Program],
    regions: int,
    breaks: Sequence[Break] = (),
    remarks: Sequence[str] = (),
) -> str:
    """Describe units, bytes, communication volume, predicted peak memory, overlap, and graph breaks.

    `remarks`: automatic choices and their reasons.
    """
    console = TextConsole(110)
    psi = sum(param.nbytes for param in layout.params)
    count = sum(param.numel for param in layout.params)
    console.print(f"{layout_line(layout)}: {count:,} parameters, {human_bytes(psi)}")
    console.print(state_line(layout), soft_wrap=True)
    if line := owners_line(layout):
        console.print(line, soft_wrap=True)
    for remark in remarks:
        console.print(remark, soft_wrap=True, markup=False, highlight=False)
    console.print(_unit_table(programs[0].layout if programs and not breaks else layout))
    if breaks:
        console.print(explain_breaks(breaks), soft_wrap=True, markup=False, highlight=False)
    if not programs:
        console.print("No program yet: the model is traced at its first call.")
    for number, program in enumerate(programs):
        kind = "training step" if program.has_backward else "inference"
        console.print(f"\nprogram {number} ({kind}, digest {program.digest()[:12]})")
        console.print(f"  volume: {volume_text(program)}")
        if beside := model_line(program):
            console.print(f"  {beside}")
        console.print(f"  predicted peak of full parameters: {human_bytes(peak_full_bytes(program))}")
        console.print(f"  predicted peak besides shards and optimizer state: {human_bytes(peak_bytes(program))}")
        for note in program.notes:
            console.print(f"  {note}", soft_wrap=True, markup=False, highlight=False)
        console.print(_overlap_table(program))
    if programs:
        console.print(f"\n{regions} distinct regions compiled for {sum(len(p.nodes(Call)) for p in programs)} calls")
    return console.text


def layout_line(layout: Layout) -> str:
    """The stage and the numbers of ranks."""
    stage = f"stage {layout.stage.number}, world {layout.world}"
    if not layout.outside:
        return stage
    if layout.has_secondary:
        return f"{stage} ({layout.hybrid}: {layout.shards} shards, {layout.parts} of which a rank has inside)"
    return f"{stage} ({' times '.join(str(axis.size) for axis in reversed(layout.averaged))} shards)"


def state_line(layout: Layout) -> str:
    """The model state of a rank in bytes, by kind."""
    state = model_state(layout)
    kept = f"{human_bytes(state.copies)} of full copies, " if state.copies else ""
    return (
        f"model state per rank: {human_bytes(state.parameters)} of parameters, {kept}{human_bytes(state.gradients)} of "
        f"gradients, {human_bytes(state.moments)} of two moments (Adam): {human_bytes(state.nbytes)}"
    )


def owners_line(layout: Layout) -> str:
    """How owned parameters are distributed among ranks; empty if there are none."""
    owned = [param for param in layout.params if param.owner is not None]
    if not owned:
        return ""
    loads = dict.fromkeys(range(layout.shards), 0)
    for param in owned:
        assert param.owner is not None, "filtered above"
        loads[param.owner] += cost_of(param.shape)
    share = max(loads.values()) * len(loads) / sum(loads.values())
    whole = "1 parameter is" if len(owned) == 1 else f"{len(owned)} parameters are"
    return (
        f"{whole} whole on one rank each, {human_bytes(most_kept(owned, len(loads)))} at most: the "
        f"optimizer's work on them is {share:.2f} of a rank's share where it is largest"
    )


def _unit_table(layout: Layout) -> Table:
    table = Table("unit", "parameters", "full", "shard per rank", "messages")
    for unit in layout.units:
        shard = sum(param.shard_numel * param.dtype.itemsize for param in unit.params)
        row = (
            escape(unit.name),
            str(len(unit.params)),
            human_bytes(unit.nbytes),
            human_bytes(shard),
            str(len(unit.messages)),
        )
        table.add_row(*row)
    return table


def volume_text(program: Program) -> str:
    """The bytes that each rank sends, and the bound of its ZeRO stage."""
    world = program.layout.world
    psi = sum(param.nbytes for param in program.layout.params)
    sent = program.volume()
    if world == 1:
        onward = stage_bytes(program)
        alone = f"each rank sends {human_bytes(onward)} to other pipeline stages" if onward else ""
        return alone or "a world of one sends nothing"
    if not psi:
        return f"each rank sends {human_bytes(sent)}; this program has no parameters"
    bound = program.layout.stage.volume if program.has_backward else program.layout.stage.volume - 1
    if outside := program.layout.outside:
        by_axis = " and ".join(f"{human_bytes(nbytes)} over {axis}" for axis, nbytes in program.volumes().items())
        inside, across = program.layout.sharded, 2 if program.has_backward else int(program.layout.has_secondary)
        bounds = [f"{bound}Ψ(S-1)/S over {inside.name}", *(f"{across}Ψ/S(R-1)/R over {axis.name}" for axis in outside)]
        return f"each rank sends {by_axis}; the stage's bounds are {' and '.join(bounds)}"
    share = sent / (psi * (world - 1) / world)
    return f"each rank sends {human_bytes(sent)} = {share:.3g}Ψ(N-1)/N; the stage's bound is {bound}Ψ(N-1)/N"


def stage_bytes(program: Program) -> int:
    """Bytes that a rank sends to other pipeline stages in a step."""
    return sum(traffic.sent for node in program.nodes(Send) if (traffic := program.traffic(node)))


def model_line(program: Program) -> str:
    """The collectives in regions, such as those of tensor parallelism; empty if there are none."""
    result: dict[str, list[int]] = {}
    for call in program.nodes(Call):
        for node in program.regions[op_of(call, Call).region].graph.nodes:
            if is_collective(node):
                name = node.target.overloadpacket.__name__.removeprefix("start_")
                result.setdefault(name, []).append(data(node).nbytes)
    listed = (f"{len(sizes)} {name} of {human_bytes(sum(sizes))}" for name, sizes in result.items())
    return f"the model's own communication, within regions: {', '.join(listed)}" if result else ""


def peak_full_bytes(program: Program) -> int:
    """Peak bytes of gathered parameters, in flight or full."""
    alive = peak = 0
    for node in program.graph.nodes:
        op = data(node).op
        if isinstance(op, (AllGather, GatherAhead, Release)):
            nbytes = program.layout.gathered_bytes(op.unit)
            alive += -nbytes if isinstance(op, Release) else nbytes
        peak = max(peak, alive)
    return peak


def _overlap_table(program: Program) -> Table:
    table = Table("communication", "sends", "in flight during", title_justify="left")
    for phase in program.phases:
        body = program.body(phase)
        for start, node in enumerate(body):
            op, traffic = data(node).op, program.traffic(node)
            if isinstance(op, Communication) and op.gives and traffic:  # not gather_ahead: it overlaps the next step
                table.add_row(f"{phase}: {node.name}", human_bytes(traffic.sent), escape(_hidden_by(body[start:])))
    return table


def _hidden_by(rest: list[fx.Node]) -> str:
    started, *following = rest
    calls = []
    for node in following:
        if data(node).op.role is Role.WAIT and started in node.all_input_nodes:
            break
        if isinstance(data(node).op, Call):
            calls.append(f"{op_of(node, Call).region} of {data(node).source or 'the root'}")
    return ", ".join(calls) or "nothing"
