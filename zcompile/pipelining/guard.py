"""What the program of a step counts on: it was traced once, and runs for what is as it was then."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import fx, nn

from zcompile.engine.module_guards import HookWatch, TreeWatch
from zcompile.engine.step_trace import Called
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program
from zcompile.passes.common.boundary import written_results

_AGAIN = "make a new train step of the model as it is to be trained"


class StepGuard:
    """A model, and the first micro-batch that a step of it was traced with."""

    def __init__(self, model: nn.Module, called: Called) -> None:
        self._model, self._tree, self._hooks = model, TreeWatch(model), HookWatch(model, itself=True)
        self._flags, self._text = _flags(model), self._hooks.text(0)
        self._batch = [_kind(leaf) for leaf in called.leaves()]

    def check(self, called: Called) -> None:
        """Return if nothing has changed that was traced.

        Raises:
            OptionError: the batch has tensors of other shapes or dtypes, or other constants.
            ModelError: the model has other modules, modes, frozen parameters or hooks.
        """
        batch = [_kind(leaf) for leaf in called.leaves()]
        if batch != self._batch:
            problem = f"has micro-batches of {', '.join(batch)}, and was traced with {', '.join(self._batch)}"
            raise OptionError(
                "batch", problem, "give batches of one size: a pipeline's program is for that of the first"
            )
        if self._tree.has_changed() or self._hooks.text(0) != self._text:
            raise ModelError(type(self._model).__name__, "has other modules or hooks than at the first step", _AGAIN)
        flags = _flags(self._model)
        for name, flag in flags.items():
            if flag != self._flags.get(name):
                subject = name or type(self._model).__name__
                raise ModelError(subject, f"is {flag} now, and was {self._flags.get(name)} at the first step", _AGAIN)


def results_of(traced: Program) -> tuple[Any, ...]:
    """The results of a traced step that are not new values of buffers: the loss, and metrics."""
    return traced.results.outputs[len(written_results(traced)) :]


def check_traced(traced: Program, metrics: int = 0) -> None:
    """Return if a pipeline can run a traced step, which gives so many metrics beside the loss.

    Raises:
        OptionError: what it gives is no loss that is trained, or something is trained that is no parameter.
        CaptureError: it writes to a tensor that is no buffer.
    """
    outputs, fix = results_of(traced), "return the loss, a tensor of one element"
    loss = data(outputs[0]).type if outputs and isinstance(outputs[0], fx.Node) else None
    if len(outputs) != 1 + metrics:
        fix += ", or the loss and a dict of tensors, which are metrics"
        raise OptionError("loss_fn", f"gives {len(outputs)} results", fix)
    if loss is None or loss.shape not in ((), (1,)):
        raise OptionError("loss_fn", f"gives a tensor of {list(loss.shape)}" if loss else "gives no tensor", fix)
    if not traced.has_backward:
        fix = "compute it from what model(...) gives, without detach() or no_grad()"
        raise OptionError("loss_fn", "gives a loss that depends on no parameter that is trained", fix)
    if any(gradient is not None for gradient in traced.results.input_gradients):
        problem = "computes with a tensor that is trained, and is no parameter of the model"
        raise OptionError("loss_fn", problem, "make it a parameter of the model")
    for node in traced.nodes(Input):
        if op_of(node, Input).mutated and op_of(node, Input).held in ("", "?"):
            problem = "is written to by the step, and is no buffer of the model"
            raise CaptureError(node.name, problem, "make it a buffer of the model, or write to a copy")


def check_mean(traced: Program) -> None:
    """Return if the loss is not seen to be a sum over the batch.

    The losses of micro-batches are averaged, which is the loss of the batch only if that is a mean over its samples.

    Raises:
        OptionError: it is a sum over the batch, or has one among its terms, that is not divided by a number of samples.
    """
    inputs = [data(node).type for node in traced.nodes(Input) if _is_batch(op_of(node, Input))]
    shapes = [found.shape for found in inputs if found is not None and found.shape]
    rows = shapes[0][0] if shapes else 1
    for term, divisors in _terms(results_of(traced)[0]):
        counts = _products([_summed(term), *shapes]) if _is_sum(term) and _reads_batch(term) else None
        if counts is not None and not any(
            math.isclose(d, n, rel_tol=1e-6) for d in divisors for n in counts if n % rows == 0
        ):
            problem = "gives a sum over the batch, and the losses of micro-batches are averaged"
            fix = "give a mean over the samples, or divide the sum by how many of them loss_fn is given"
            raise OptionError("loss_fn", problem, fix)


def _terms(loss: Any) -> Iterator[tuple[fx.Node, list[float]]]:
    """What a loss is added up from, each with the numbers that it is divided by.

    What is divided by something that depends on the batch, as the number of its tokens that count, is left out.
    """
    waiting, aten = [(loss, list[float]())], torch.ops.aten
    while waiting:
        node, divisors = waiting.pop()
        if not isinstance(node, fx.Node):
            continue
        if node.target in _UNSCALED or node.target is operator.getitem:
            waiting.append((node.args[0], divisors))
        elif node.target in (aten.add.Tensor, aten.sub.Tensor):
            waiting += [(one, divisors) for one in node.args[:2]]
        elif node.target in _FACTORS:
            one, other = node.args[:2]
            if isinstance(one, fx.Node) and isinstance(other, fx.Node):
                if not (_reads_batch(one) and _reads_batch(other)):
                    waiting += [(one, divisors), (other, divisors)]
                continue
            factor = other if isinstance(one, fx.Node) else one
            divisor = factor if node.target in (aten.div.Tensor, aten.div.Scalar) else 1 / factor if factor else 0.0
            waiting.append((one if isinstance(one, fx.Node) else other, [*divisors, divisor]))
        else:
            yield node, divisors


def _products(shapes: Sequence[tuple[int, ...]]) -> set[int]:
    """How many elements there are along any dimensions of these shapes."""
    return {
        math.prod(some) for shape in shapes for count in range(1, len(shape) + 1) for some in combinations(shape, count)
    }


def _is_sum(node: fx.Node) -> bool:
    if node.target in _SUMS:
        return True
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "reduction" not in names:
        return False
    place = names.index("reduction")
    return (node.args[place] if place < len(node.args) else node.kwargs.get("reduction")) == _SUM


def _summed(node: fx.Node) -> tuple[int, ...]:
    """The shape of what is summed: of losses, that of the targets."""
    source = node.args[0 if node.target in _SUMS else 1]
    found = data(source).type if isinstance(source, fx.Node) else None
    return found.shape if found is not None else ()


_SUMS = {torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList}
_FACTORS = {torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar, torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar}
_SUM = 2
"""What `reduction="sum"` is to operations."""
_UNSCALED = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default}
_UNSCALED |= {torch.ops.aten.squeeze.default, torch.ops.aten.unsqueeze.default, torch.ops.aten.neg.default}
_UNSCALED |= {torch.ops.aten._to_copy.default, torch.ops.aten.detach.default}
"""Operations behind which a sum is one still."""


def _is_batch(op: Input) -> bool:
    return op.kind is Kind.DATA and not op.held


def _reads_batch(node: fx.Node) -> bool:
    """True if a value depends on what the step is called with, not on parameters and buffers alone."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        one = waiting.pop()
        if isinstance(op := data(one).op, Input) and _is_batch(op):
            return True
        seen.add(one)
        waiting += [source for source in one.all_input_nodes if source not in seen]
    return False


def say_statistics(model: nn.Module, traced: Program) -> None:
    """Warn where batch normalization has other statistics than of whole batches."""
    written = {op_of(node, Input).held for node in traced.nodes(Input) if op_of(node, Input).mutated}
    for path, module in model.named_modules():
        if getattr(module, "track_running_stats", False) and f"{path}.running_mean" in written:
            text = f"{path}: {type(module).__name__} normalizes by the statistics of each micro-batch, not of the batch"
            warnings.warn(text, stacklevel=2)
            return  # one of them is enough


def _flags(model: nn.Module) -> dict[str, str]:
    """In which mode modules are, and which parameters are trained."""
    modes = {path: "training" if module.training else "evaluating" for path, module in model.named_modules()}
    trained = {name: "trained" if one.requires_grad else "frozen" for name, one in model.named_parameters()}
    return {**modes, **trained}


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}"
    plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device))
    return repr(leaf) if plain else type(leaf).__name__  # of others torch.compile's guards tell
