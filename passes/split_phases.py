"""split_phases: split the step into forward and backward, and decide which values the forward saves.

Parameters, and values cheaply derived from them, are never saved: the backward derives them again.

    t = aten.t.default(w)                          t = aten.t.default(w)
    y = aten.mm.default(x, t)                      y = aten.mm.default(x, t)
    return [y], [x, t]                  ->         return [y], [x]

    t_1 = aten.t.default(t)                        t_2 = aten.t.default(w)
    dx = aten.mm.default(dy, t_1)                  t_1 = aten.t.default(t_2)
                                                   dx = aten.mm.default(dy, t_1)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from zcompile.ir.operation import Data, Phase, data, has_data, set_data
from zcompile.ir.ops import Compute, Input, Item, Kind, Parameter, Results
from zcompile.ir.parameter_views import derived_values, is_view
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.side_effects import is_random
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.aot_autograd import default_partition, min_cut_rematerialization_partition, partitioning
from zcompile.torch_internals.operators import random_state, replayed_random, saved_random

_PARTITIONS: dict[str, Callable[..., tuple[fx.GraphModule, fx.GraphModule]]] = {
    "default": default_partition,
    "min_cut": min_cut_rematerialization_partition,
}


def split_phases(program: Program, *, partition: Literal["min_cut", "default"] = "min_cut") -> Program:
    """Split the step at the turn with a partitioner of torch, then derive parameter views again in the backward."""
    program = _undetached(program)
    program = _partitioned(program, partition) if program.has_backward else program
    _reread_parameters(program)
    _copy_overwritten(program)
    program.graph.eliminate_dead_code()
    return program


def _undetached(program: Program) -> Program:
    """Return a copy of `program` without `detach`, which has no effect within a graph.

    Attention kernels save detached views of their results for the backward: each view would become a region.
    """
    program = program.copy()
    ends = {*program.results.outputs, *program.results.backward_nodes()}
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        (source,) = node.all_input_nodes
        op = data(source).op
        if node not in ends and (isinstance(op, (Compute, Item)) or (isinstance(op, Input) and not op.mutated)):
            node.replace_all_uses_with(source)
            program.graph.erase_node(node)
    return program


def _copy_overwritten(program: Program) -> None:
    """Let the backward read a copy of each buffer that the forward overwrites: recomputation needs the old value.

    This happens with batch normalization within `torch.utils.checkpoint`.
    """
    placeholders = program.graph.find_nodes(op="placeholder")
    for node in placeholders:
        op = data(node).op
        later = [user for user in node.users if data(user).phase is Phase.BACKWARD and user.op != "output"]
        if not (isinstance(op, Input) and op.mutated and later):
            continue
        with program.graph.inserting_after(placeholders[-1]):
            copied = program.graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta = {**node.meta, "partitioner_tag": "is_forward"}
        set_data(copied, Data(Compute(), type=data(node).type))
        for user in later:
            user.replace_input_with(node, copied)


def _partitioned(program: Program, partition: str) -> Program:
    results = program.results
    joint = _joint_module(program)
    static = [i for i, n in enumerate(program.graph.find_nodes(op="placeholder")) if isinstance(data(n).op, Parameter)]
    with partitioning(node.meta.get("val") for node in joint.graph.nodes):
        forward, backward = _PARTITIONS[partition](
            joint, (), num_fwd_outputs=len(results.outputs), static_lifetime_input_indices=static
        )
    _drop_repeated_draws(forward.graph, backward.graph)
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        values[node.name] = values[_joint_name(node)] = graph.node_copy(node)
    forward_ends = _append(graph, forward.graph, values, Phase.FORWARD)
    values |= _renamed(forward.graph, backward.graph, values, forward_ends[len(results.outputs) :])
    backward_ends = _append(graph, backward.graph, values, Phase.BACKWARD)
    inputs = len(results.input_gradients)
    set_results(
        graph,
        outputs=forward_ends[: len(results.outputs)],
        input_gradients=backward_ends[:inputs],
        gradients=dict(zip(results.gradients, backward_ends[inputs:], strict=True)),
    )
    return replace(program, graph=graph)


def _drop_repeated_draws(forward: fx.Graph, backward: fx.Graph) -> None:
    """Erase random draws of the forward that the partitioner repeats in the backward without any reader.

    FX never treats them as dead code, and they would advance the generator.
    """
    drawn = {node.name for node in forward.nodes if is_random(node)}
    for node in reversed(backward.nodes):
        if node.name in drawn and is_random(node) and not node.users:
            backward.erase_node(node)


def _joint_module(program: Program) -> fx.GraphModule:
    """Return the joint graph as partitioners expect it: its results are one flat list, outputs then gradients."""
    copy = program.copy()
    for node in [node for node in copy.graph.find_nodes(op="placeholder") if _joint_name(node) != node.name]:
        with copy.graph.inserting_before(node):
            tangent = copy.graph.placeholder(_joint_name(node))
        tangent.meta = node.meta
        node.replace_all_uses_with(tangent)
        copy.graph.erase_node(node)
    results = copy.results
    end = copy.graph.output_node()
    end.args = ([*results.outputs, *results.input_gradients, *results.gradients.values()],)
    end.meta["partitioner_tag"] = "is_backward"
    root = torch.nn.Module()
    for name, module in program.modules.items():
        setattr(root, name, module)
    return fx.GraphModule(root, copy.graph)


def _joint_name(node: fx.Node) -> str:
    """Return the name of a placeholder in the joint graph: partitioners recognize tangents by name.

    A tangent under any other name counts as a forward value, and what they recompute would precede the whole backward.
    """
    op = data(node).op
    is_tangent = isinstance(op, Input) and op.kind is Kind.TANGENT
    return f"tangents_{node.name}" if is_tangent and "tangents" not in node.name else node.name


def _append(graph: fx.Graph, part: fx.Graph, values: dict[str, fx.Node], phase: Phase) -> list[Any]:
    """Append `part` to `graph`, looking up placeholders by name in `values`; return the copies of its results."""
    inside: dict[fx.Node, fx.Node] = {}
    for node in part.nodes:
        if node.op == "placeholder":
            inside[node] = values[node.name]
        elif node.op != "output":
            if node.target is replayed_random and "val" not in node.meta:
                node.meta["val"] = _replayed_value(node)
            elif _is_state(node):
                node.meta["val"] = _of_fixed_size(node)
            inside[node] = copied = graph.node_copy(node, inside.__getitem__)
            set_data(copied, replace(_known(node), phase=phase))
            if phase is Phase.FORWARD:
                values[node.name] = copied
    (results,) = part.output_node().args
    return [inside[value] if isinstance(value, fx.Node) else value for value in results]  # type: ignore[union-attr]


def _replayed_value(node: fx.Node) -> Any:
    """Return the fake value of a replayed random operation, which torch's partitioner leaves unset."""
    of_values: Any = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    (_, operation, *args), kwargs = of_values
    return operation(*args, **kwargs)


def _is_state(node: fx.Node) -> bool:
    """Return True for the generator state that is saved for the backward."""
    return node.target is operator.getitem and node.all_input_nodes[0].target is saved_random and not node.args[1]


def _of_fixed_size(state: fx.Node) -> torch.Tensor:
    """Return the fake value of a generator state with its fixed size, which torch's partitioner makes symbolic."""
    drawn = (user.meta["val"] for user in state.all_input_nodes[0].users if user is not state)
    return random_state(next(drawn))


def _renamed(
    forward: fx.Graph, backward: fx.Graph, values: dict[str, fx.Node], saved: list[fx.Node]
) -> dict[str, fx.Node]:
    """Map the backward's names of saved values that the forward names differently, random states, by their order."""
    entries = [node.name for node in backward.find_nodes(op="placeholder")]
    (ends,) = forward.output_node().args
    names = [node.name for node in list(ends)[-len(saved) :]] if saved else []  # type: ignore[arg-type]
    unmatched = [value for name, value in zip(names, saved, strict=True) if name not in entries]
    return dict(zip((name for name in entries if name not in values), unmatched, strict=True))


def _known(node: fx.Node) -> Data:
    """Return the data of a node; new data if the partitioner inserted it, as it does to replay random numbers."""
    source = node.all_input_nodes[0] if node.target is operator.getitem else None
    if has_data(node):
        # The drawn value inherits the data of the operation that it replaces, but is an item of a pair now.
        of_pair = source is not None and source.target is saved_random
        return replace(data(node), op=Item(1)) if of_pair else data(node)
    several = source is not None and (
        source.target is saved_random or isinstance(source.meta.get("val"), (tuple, list))
    )
    op = Item(int(str(node.args[1]))) if several else Compute()
    return Data(op, type=TensorType.of(node.meta.get("val")), source=_drawn_for(source or node), view=is_view(node))


def _drawn_for(node: fx.Node) -> str:
    """Return the module whose code draws the value of a `saved_random`; "" for any other node."""
    drawn = (user for user in node.users if node.target is saved_random and has_data(user))
    return next((data(user).source for user in drawn), "")


def _reread_parameters(program: Program) -> None:
    """Derive the parameter views that the backward reads again there, instead of saving them in the forward."""
    derived = {node for node in derived_values(program) if data(node).phase is Phase.FORWARD}
    again: dict[fx.Node, fx.Node] = {}

    def rederive(node: fx.Node, user: fx.Node) -> fx.Node:
        if node not in derived:
            return node
        if node not in again:
            sources = {source: rederive(source, user) for source in node.all_input_nodes}
            with program.graph.inserting_before(user):
                again[node] = program.graph.node_copy(node, sources.__getitem__)
            set_data(again[node], replace(data(node), phase=Phase.BACKWARD))
        return again[node]

    for user in list(program.graph.nodes):
        if data(user).phase is Phase.BACKWARD and not isinstance(data(user).op, Results):
            for source in user.all_input_nodes:
                user.replace_input_with(source, rederive(source, user))
