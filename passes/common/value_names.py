"""Names of values between regions: the unit or module that they come from, and their role there.

layers_0_out                a value that a later forward region, or the caller, reads: by the module that computes it
cos                         the same, computed from inputs alone by code in no unit: by its operation
layers_0_saved_2            a value that only the backward reads; the number is its index among the region's results
layers_0_grad_input         a gradient that another region of the backward, or the caller, reads
layers_0_full_grads_1       this rank's gradient of a parameter
layers_0_again              a value that the backward recomputes for other regions of the backward
loss, loss_grad             the only scalar that a model returns, and its gradient, with which the backward begins
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum

from torch import fx

from zcompile.ir.bundles import FULL_GRADS, SAVED, member_name
from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import Input, Kind, Parameter
from zcompile.ir.program import Program
from zcompile.ir.spelling import identifier
from zcompile.ir.tensor_type import TensorType


class Use(IntEnum):
    """Who reads a result of a region; results are returned in this order."""

    ANY = 0
    SAVED = 1
    GRADIENT = 2


class ValueNames:
    """Names the values of a program while its regions are outlined, in program order."""

    def __init__(self, program: Program, units: Mapping[str, str], around: str) -> None:
        self.units, self.around = units, around
        """The printed name of each unit; the common prefix of module names, which is left out."""
        self.modules = {m: unit for unit in program.layout.units for m in unit.modules if m}
        self.of_inputs = _from_inputs(program)
        results = program.results
        scalars = [v for v in results.outputs if isinstance(v, fx.Node) and _is_number(data(v).type)]
        self.loss = scalars[0] if len(set(scalars)) == 1 and scalars[0].op != "placeholder" else None
        self.unit_of_gradient = {node: program.layout.unit_of(name).name for name, node in results.gradients.items()}
        self.gradients = _from_tangents(program)
        self.runs: Counter[tuple[Phase, str]] = Counter()

    def of_tangent(self, tangent: Input, outputs: Sequence[object]) -> str:
        """Return the name of a tangent: after the forward's output, out of `outputs`, whose gradient it is."""
        result = outputs[tangent.result] if tangent.result is not None and tangent.result < len(outputs) else None
        return f"{result.name}_grad" if isinstance(result, fx.Node) else "grad_output"

    def of_results(self, phase: Phase, where: str, gives: Sequence[fx.Node], uses: Sequence[Use]) -> list[str]:
        """Return names for the results of the next region at `where`, the name of a unit or module."""
        self.runs[phase, where] += 1
        number = self.runs[phase, where]
        stem = where if number == 1 else _joined(where, f"run{number}")
        given = list(zip(gives, uses, strict=True))
        stems = [self._unit(node, number) if use is Use.GRADIENT else stem for node, use in given]
        numbered = Counter(zip(stems, uses, strict=True))
        return [
            self._plain(phase, where, node) if use is Use.ANY else _numbered(base, use, numbered[base, use] > 1, index)
            for index, (node, use, base) in enumerate(zip(gives, uses, stems, strict=True))
        ]

    def _plain(self, phase: Phase, where: str, node: fx.Node) -> str:
        if node is self.loss:
            return "loss"
        if phase is Phase.FORWARD:
            return self._made(where, node)
        return _joined(where, "grad_input" if node in self.gradients else "again")

    def _made(self, where: str, node: fx.Node) -> str:
        """Name a value after its module in a unit; if it is in none and of inputs alone, its module or operation."""
        source = data(node).source
        path = source
        while path and path not in self.modules:
            path = path.rpartition(".")[0]
        if path:
            unit = self.modules[path]
            return _joined(self.units[unit.name] if path == unit.name else self._called(path), "out")
        if node not in self.of_inputs or not where:
            return _joined(where, "out")
        is_around = not source or any(module.startswith(f"{source}.") for module in self.modules)
        return node.name if is_around else _joined(self._called(source), "out")

    def _called(self, module: str) -> str:
        return identifier(module.removeprefix(self.around))

    def _unit(self, gradient: fx.Node, number: int) -> str:
        name = self.units[self.unit_of_gradient[gradient]]
        return name if number == 1 else f"{name}_run{number}"


def _is_number(type_: TensorType | None) -> bool:
    """Return True for a floating-point scalar."""
    return type_ is not None and not type_.dims and type_.dtype.is_floating_point


def _numbered(stem: str, use: Use, several: bool, index: int) -> str:
    name = _joined(stem, SAVED if use is Use.SAVED else FULL_GRADS)
    return member_name(name, index) if several else name.removesuffix("s")


def _joined(where: str, role: str) -> str:
    return f"{where}_{role}" if where else role


def _from_inputs(program: Program) -> set[fx.Node]:
    """Return the nodes computed from inputs alone: masks, positions and the like."""
    of_parameters: set[fx.Node] = set()
    for node in program.graph.nodes:
        if isinstance(data(node).op, Parameter) or of_parameters.intersection(node.all_input_nodes):
            of_parameters.add(node)
    return set(program.graph.nodes) - of_parameters


def _from_tangents(program: Program) -> set[fx.Node]:
    """Return the nodes computed from the gradients that the backward begins with."""
    result: set[fx.Node] = set()
    for node in program.graph.nodes:
        op = data(node).op
        begins = isinstance(op, Input) and op.kind is Kind.TANGENT
        if begins or any(source in result for source in node.all_input_nodes):
            result.add(node)
    return result
