"""Capture: a `torch.compile` backend that turns AOTAutograd's joint graph into a Program.

AOTAutograd still handles mutated buffers, aliased outputs, random numbers, saved tensors and dynamic shapes. It calls a
partitioner to split the joint graph, and compilers for the halves. We return stub graphs for the halves, with the saved
values of the rewritten program, and callables that run that program.

Capture knows nothing of ranks: a `Lowering` turns the program into a runner.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile.errors import CaptureError
from zcompile.frontend.graph_edits import give_floats_as_tensors, make_dense, repeat_key_heads, written_out
from zcompile.frontend.links import without_placeholders
from zcompile.frontend.step_cache import (
    BackwardCode,
    ForwardCode,
    Runner,
    StepCache,
    can_be_kept,
    global_state,
    looking,
    nested_in,
)
from zcompile.frontend.written_inputs import (
    check_overlaps,
    refuse_new_data,
    refuse_opaque_calls,
    refuse_written_parameter,
    where,
)
from zcompile.ir.layout import Layout
from zcompile.ir.operation import Data, Phase, data, op_of, set_data
from zcompile.ir.ops import Compute, Input, Item, Kind, Parameter
from zcompile.ir.parameter_views import is_view
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.spelling import free, identifier
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.aot_autograd import (
    aot_autograd,
    cached_steps,
    default_partition,
    is_tangent,
    keepable,
    promise_no_donated_buffers,
    tracing_config,
)
from zcompile.torch_internals.dynamo import handed_on
from zcompile.torch_internals.sizes import is_symbolic

Lowering = Callable[[Program], Runner]


@dataclass(frozen=True)
class Names:
    """Names of traced inputs: of parameters and of others, such as buffers, by `id`; and all module paths."""

    parameters: Mapping[int, str]
    others: Mapping[int, str]
    modules: frozenset[str]
    arguments: tuple[str, ...] = ()
    """Names of the positional arguments of the traced module's forward."""
    root: str = ""
    """Path of the traced module in the model."""
    apart: frozenset[int] = frozenset()
    """The `id` of inputs of which ranks have different parts."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """The indices of tensors among the arguments of the call, by `id`, if needed."""

    def of_input(self, target: str) -> str:
        """Return a readable name for an input that Dynamo calls `L_args_0_` or `L_kwargs_targets_`."""
        plain = re.sub(r"^L_|_$", "", target).strip("_")
        if (match := re.match(r"args_(\d+)", plain)) and int(match[1]) < len(self.arguments):
            return self.arguments[int(match[1])] + plain[match.end() :]
        return plain.removeprefix("kwargs_") or "x"

    def source(self, node: fx.Node) -> str:
        """Return the path of the module that a node, or the forward of a backward node, comes from."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        if not stack:
            return self.root
        words = re.findall(r"\w+", list(stack.values())[-1][0])
        prefix = f"{self.root}." if self.root else ""
        suffixes = (prefix + ".".join(words[start:]) for start in range(len(words)))
        return next((path for path in suffixes if path in self.modules), self.root)


@dataclass(frozen=True, slots=True)
class TracedInput:
    """An input of a Dynamo graph: its readable name, its parameter if it is one, and `Input.held` and `Input.leaf`."""

    readable: str
    parameter: str | None = None
    held: str = ""
    leaf: int | None = None


@dataclass
class Capture:
    """The backend for one traced graph."""

    names: Names
    layout: Layout
    lower: Lowering
    inputs: list[TracedInput] = field(default_factory=list)
    """The inputs of the Dynamo graph."""
    runner: Runner | None = None
    cache: StepCache | None = None
    """The cache in which to look up and store the step; None to trace it each time."""
    decompositions: Mapping[Any, Callable[..., Any]] | None = None
    """What operations are decomposed into: see `loss_decompositions`."""
    divides_heads: bool = False
    """Whether the ranks that divide a sequence divide heads of attention."""
    around_lowering: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Returns the context in which programs are lowered."""

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        placeholders = module.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, example_inputs, strict=True):
            name = self.names.parameters.get(id(value))
            other = self.names.others.get(id(value))
            is_argument = re.match(r"L_(args|kwargs)_", str(node.target)) and id(value) not in self.names.apart
            held = "" if is_argument else other or "?"
            readable = name or other or self.names.of_input(str(node.target))
            self.inputs.append(TracedInput(readable, name, held, self.names.leaves.get(id(value))))
        entries = dict(zip(placeholders, self.inputs, strict=True))
        named = {node: entry.readable for node, entry in entries.items()}
        refuse_new_data(module.graph, named, {node: e.parameter for node, e in entries.items() if e.parameter})
        give_floats_as_tensors(module)
        make_dense(module, named)
        if self.divides_heads and (sequence := self.layout.sequence) is not None:
            repeat_key_heads(module, sequence.size)
        with tracing_config():
            if self.cache is None or not can_be_kept(module, example_inputs):
                compiled = self._traced(module, example_inputs)
            else:
                compiled = self._found_or_traced(module, example_inputs, self.cache)
        given = {i: entry.readable for i, (node, entry) in enumerate(entries.items()) if _is_given(node, entry)}
        positions = [i for i, entry in enumerate(self.inputs) if entry.parameter]
        return without_placeholders(check_overlaps(compiled, given), positions)

    def _traced(self, module: fx.GraphModule, inputs: Sequence[Any], *, keep: bool = False) -> Callable[..., Any]:
        """Compile a graph with AOTAutograd; with `keep`, look it up in its cache first, and store it there."""
        mark = keepable if keep else lambda compiler: compiler
        frontend = aot_autograd(
            fw_compiler=mark(self._forward),
            bw_compiler=mark(self._backward),
            inference_compiler=mark(self._inference),
            partition_fn=self._partition,
            decompositions=self.decompositions,
        )
        compiled: Callable[..., Any] = frontend(module, inputs)
        return compiled

    def _found_or_traced(self, module: fx.GraphModule, inputs: Sequence[Any], cache: StepCache) -> Callable[..., Any]:
        with cached_steps(self._tag(module, cache)) as outside:

            def restored(content: bytes) -> Runner:
                with outside():
                    return cache.restore(content)

            self.around_lowering = outside
            with looking(restored):
                return self._traced(module, inputs, keep=True)

    def _tag(self, module: fx.GraphModule, cache: StepCache) -> str:
        """Return a digest of what torch's key for the graph lacks, such as names and the modules of operations."""
        names, graphs = self.names, nested_in(module)
        sources = [names.source(node) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
        own = self.inputs, sources, sorted(names.modules), names.arguments, names.root, self.layout
        content = repr((own, cache.depends_on, global_state()))
        return hashlib.sha256(content.encode(errors="backslashreplace")).hexdigest()

    def _lowered(self, program: Program) -> Runner:
        with self.around_lowering():
            return self.lower(program)

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if not joint_inputs:  # the joint graph of a nested graph, which is inlined into its callers instead
            halves: tuple[fx.GraphModule, fx.GraphModule] = default_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
            )
            return halves
        program = read_joint(written_out(joint), num_fwd_outputs, self.inputs, self.names, self.layout)
        self.runner = self._lowered(program)
        return _stubs(joint, num_fwd_outputs, self.runner)

    def _forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> ForwardCode:
        assert self.runner is not None, "AOTAutograd partitions before it compiles"
        return ForwardCode(self.runner)

    def _backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> BackwardCode:
        promise_no_donated_buffers()
        assert self.runner is not None, "AOTAutograd partitions before it compiles"
        return BackwardCode(self.runner)

    def _inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> ForwardCode:
        (results,) = module.graph.output_node().args
        count = len(results) if isinstance(results, (list, tuple)) else 1
        program = read_joint(written_out(module), count, self.inputs, self.names, self.layout)
        return ForwardCode(self._lowered(program))


def _is_given(node: fx.Node, entry: TracedInput) -> bool:
    """Return True for an argument that users pass: not a parameter, a buffer, or an attribute of the module."""
    return not entry.parameter and entry.held in ("", "?") and not str(node.target).startswith("L_self_")


def refuse_handed_on(names: Names) -> None:
    """Raise CaptureError if code returns or stores a parameter itself; must be called within a backend."""
    for identity in handed_on() & names.parameters.keys():
        problem = "the model returns this parameter, or stores it in an attribute, a list or the like"
        fix = "return, or store, a copy: .clone()"
        raise CaptureError(names.parameters[identity], f"{problem}; it is not full after the call", fix)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_joint(
    joint: fx.GraphModule, num_outputs: int, inputs: Sequence[TracedInput], names: Names, layout: Layout
) -> Program:
    """Convert AOTAutograd's joint graph, or a forward graph, to a Program; raise CaptureError if it has no program."""
    refuse_opaque_calls(joint.graph, names.source)
    reader = _Reader(joint, inputs, names)
    return reader.read(num_outputs, layout)


class _Reader:
    def __init__(self, joint: fx.GraphModule, inputs: Sequence[TracedInput], names: Names) -> None:
        self.joint, self.inputs, self.names = joint, inputs, names
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        self.modules: dict[str, fx.GraphModule] = {}
        self.primals: list[tuple[fx.Node, str | None]] = []
        described = joint.graph.output_node().meta.get("desc", ())
        self.mutated = {index for index in map(_written_input, described) if index is not None}
        """The indices of inputs that the forward writes to."""
        self.described = list(described)
        """AOTAutograd's descriptors of the results, the forward's first."""

    def read(self, num_outputs: int, layout: Layout) -> Program:
        for node in self.joint.graph.find_nodes(op="placeholder"):
            self.values[node] = self._placeholder(node)
        for node in self.joint.graph.find_nodes(op="get_attr"):
            self.values[node] = self._attribute(node)
        for node in self.joint.graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._computation(node)
        unused = self._results(num_outputs, layout)
        program = Program(self.graph, layout, constants=self.constants, modules=self.modules, unused=frozenset(unused))
        _refuse_returned_parameters(program)
        return program

    def _placeholder(self, node: fx.Node) -> fx.Node:
        kind = type(node.meta.get("desc")).__name__
        if kind == "TangentAOTInput":
            output = getattr(node.meta["desc"], "output", None)
            result = self.described.index(output) if output in self.described else None
            op = Input(Kind.TANGENT, len(self.values) - len(self.primals), result=result)
            return self._copy(node, Data(op, Phase.BACKWARD), node.name)
        # AOTAutograd may drop or replace inputs of the Dynamo graph; its descriptors have the original index.
        index = getattr(node.meta.get("desc"), "idx", None)
        entry = self.inputs[index] if index is not None else TracedInput(node.name, held="?")
        data_input = Input(Kind.DATA, len(self.primals), index in self.mutated, entry.held, leaf=entry.leaf)
        meta = Data(Parameter(entry.parameter) if entry.parameter else data_input)
        self.primals.append((node, entry.parameter))
        return self._copy(node, meta, identifier(entry.readable))

    def _attribute(self, node: fx.Node) -> fx.Node:
        value = operator.attrgetter(str(node.target))(self.joint)
        if isinstance(value, fx.GraphModule):
            self.modules[str(node.target)] = value
            return self._copy(node, Data(Compute()), node.name)
        copied = self.graph.create_node("placeholder", f"primals_{node.name}", name=node.name)
        # No other meta: within `torch.utils.checkpoint` it marks the node for recomputation, which fails for an input.
        copied.meta = {"val": node.meta.get("val", value), "partitioner_tag": "is_forward"}
        self.constants[copied.name] = value
        return set_data(copied, Data(Input(Kind.CONSTANT, len(self.constants) - 1), type=TensorType.of(value)))

    def _computation(self, node: fx.Node) -> fx.Node:
        backward = "backward" in str(node.meta.get("partitioner_tag", ""))
        is_item = node.target is operator.getitem and isinstance(node.all_input_nodes[0].meta.get("val"), (tuple, list))
        op = Item(int(str(node.args[1]))) if is_item else Compute()
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        view = is_view(node.all_input_nodes[0] if is_item else node)
        return self._copy(node, Data(op, phase, source=self.names.source(node), view=view), node.name)

    def _copy(self, node: fx.Node, meta: Data, name: str) -> fx.Node:
        copied = self.graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, self.values.__getitem__),
            fx.map_arg(node.kwargs, self.values.__getitem__),
            name=free(name),
        )
        copied.meta = dict(node.meta)
        type_ = TensorType.of(node.meta.get("val"))
        return set_data(copied, Data(meta.op, meta.phase, type_, meta.source, view=meta.view))

    def _results(self, num_outputs: int, layout: Layout) -> set[str]:
        """End the graph; return the trainable parameters that get no gradient."""
        (returned,) = self.joint.graph.output_node().args
        values = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        values = [self.values[value] if isinstance(value, fx.Node) else value for value in values]
        self._refuse_mutated_parameters(values)
        by_primal = list(zip(self.primals, values[num_outputs:], strict=False))
        gradients = {name: grad for (_, name), grad in by_primal if name and grad is not None}
        set_results(
            self.graph,
            outputs=values[:num_outputs],
            input_gradients=[grad for (_, name), grad in by_primal if not name],
            gradients=gradients,
        )
        return {*layout.trainable} - gradients.keys()

    def _refuse_mutated_parameters(self, values: Sequence[Any]) -> None:
        for value, described in zip(values, self.described, strict=False):
            index = _written_input(described)
            if index is not None and (name := self.inputs[index].parameter):
                refuse_written_parameter(name, where(value) if isinstance(value, fx.Node) else "")


def _written_input(described: Any) -> int | None:
    """Return the index of the input whose new value a result is, by AOTAutograd's descriptor, or None."""
    index: int | None = getattr(getattr(described, "mutated_input", None), "idx", None)
    return index


def _refuse_returned_parameters(program: Program) -> None:
    for index, value in enumerate(program.results.outputs):
        root = value
        while isinstance(root, fx.Node) and data(root).view:
            root = root.all_input_nodes[0]
        if isinstance(root, fx.Node) and isinstance(data(root).op, Parameter):
            problem = (
                f"result {index} of the model is this parameter (or a view of it), which is not full after the call"
            )
            raise CaptureError(op_of(root, Parameter).name, problem, "return a copy: .clone()")


# -- stubs ------------------------------------------------------------------------------------------------------------


def _stub(*_: object) -> None:
    """Represents, in AOTAutograd's graphs, any value that the rewritten program computes."""


def _stubs(joint: fx.GraphModule, num_outputs: int, runner: Runner) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward graphs with the right inputs, outputs and saved values, and no operations."""
    (returned,) = joint.graph.output_node().args
    results: list[Any] = list(returned)  # type: ignore[arg-type]
    described = joint.graph.output_node().meta.get("desc", [None] * len(results))
    placeholders = joint.graph.find_nodes(op="placeholder")
    tangents = [n for n in placeholders if is_tangent(n)]
    primals = [n for n in placeholders if n not in tangents]
    sizes = [node for node in runner.saved if is_symbolic(node.meta.get("val"))]
    tensors = [node for node in runner.saved if node not in sizes]

    forward = _StubGraph(joint)
    entries = [forward.input(node) for node in primals]
    full = [entries[index] for index in runner.reread]
    outputs = [forward.value(v) if isinstance(v, fx.Node) else v for v in results[:num_outputs]]
    saved = [*map(forward.value, tensors), *full, *map(forward.value, sizes)]
    forward.graph.output((*outputs, *saved)).meta["desc"] = [*described[:num_outputs], *([None] * len(saved))]

    backward = _StubGraph(joint)
    for node in (*sizes, *tensors, *full, *tangents):
        backward.input(node)
    gradients = [backward.value(v) if isinstance(v, fx.Node) else v for v in results[num_outputs:]]
    backward.graph.output(tuple(gradients)).meta["desc"] = described[num_outputs:]
    return forward.module(), backward.module()


class _StubGraph:
    """A graph of placeholders and stubs."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.graph = fx.Graph()
        self.root = root

    def input(self, node: fx.Node) -> fx.Node:
        made = self.graph.create_node("placeholder", node.name, name=node.name)
        made.meta = dict(node.meta)
        return made

    def value(self, node: fx.Node) -> fx.Node:
        made = self.graph.call_function(_stub)
        made.meta = dict(node.meta)
        return made

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(self.root, self.graph)
