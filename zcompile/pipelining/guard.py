"""Guards of a step, which is traced once and valid only for equal inputs and an unchanged model; micro-batches."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import fx, nn

from zcompile.engine.calls.module_guards import HookWatch, TreeWatch
from zcompile.engine.step_trace import CallSpec
from zcompile.engine.train_steps import ONE_ELEMENT, untrained_loss
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Input
from zcompile.ir.program import Program
from zcompile.passes.common.boundary import written_results
from zcompile.torch_internals.pytree import leaves_by_path, tree_leaves, tree_map_only

SAME_DATA = "let all ranks along 'pp' and 'sp' read the same data: samplers count the ranks along 'dp' alone"
"""The fix if ranks along these axes have different batches."""
_AGAIN = "make a new train step of the model as it is to be trained"


class StepGuard:
    """Compares the model and micro-batches with those that the step was traced with."""

    def __init__(self, model: nn.Module, called: CallSpec) -> None:
        self._model, self._tree, self._hooks = model, TreeWatch(model), HookWatch(model, itself=True)
        self._flags, self._text = _flags(model), self._hooks.text(0)
        self._batch = _kinds(called)

    def check(self, called: CallSpec) -> None:
        """Check a micro-batch and the model.

        Raises:
            OptionError: shapes, dtypes or constants differ from the traced micro-batch.
            ModelError: modules, modes, frozen parameters or hooks have changed.
        """
        batch = _kinds(called)
        if batch != self._batch:
            names = [name for name in {**self._batch, **batch} if batch.get(name) != self._batch.get(name)]
            now, before = (
                ", ".join(f"{name} {kinds.get(name, 'left out')}" for name in names) for kinds in (batch, self._batch)
            )
            problem = f"has {now}, and its step was traced with {before}"
            fix = "give batches of one size, and varying values as tensors; or make a train step for each kind"
            raise OptionError("batch", problem, fix)
        self.check_modules()
        flags = _flags(self._model)
        for name, flag in flags.items():
            if flag != self._flags.get(name):
                subject = name or type(self._model).__name__
                raise ModelError(subject, f"is {flag} now, and was {self._flags.get(name)} at the first step", _AGAIN)

    def check_modules(self) -> None:
        """Raise ModelError if modules or hooks have changed since the first step."""
        if self._tree.has_changed() or self._hooks.text(0) != self._text:
            raise ModelError(type(self._model).__name__, "has other modules or hooks than at the first step", _AGAIN)


def traced_with(model: nn.Module, called: CallSpec) -> str:
    """The guards of an evaluation as text: kinds of arguments, modes and frozen parameters, a line each."""
    lines = [f"{name}: {value}" for name, value in (*_kinds(called).items(), *_flags(model).items())]
    return "\n".join(lines)


def results_of(traced: Program) -> tuple[Any, ...]:
    """The loss and metrics of a traced step: its outputs without new values of buffers."""
    return traced.results.outputs[len(written_results(traced)) :]


def check_traced(traced: Program, metrics: int = 0, *, trains: bool = True) -> None:
    """Check that a pipeline can run a traced step, or an evaluation, that returns a loss and `metrics` metrics.

    Raises:
        OptionError: it does not return a loss with a gradient, or a tensor other than parameters requires grad.
        CaptureError: it writes to a tensor that is not a buffer.
    """
    outputs, fix = results_of(traced), ONE_ELEMENT
    loss = data(outputs[0]).type if outputs and isinstance(outputs[0], fx.Node) else None
    if len(outputs) != 1 + metrics:
        fix += ", or the loss and a dict of tensors, which are metrics"
        raise OptionError("loss_fn", f"returns {len(outputs)} results", fix)
    if loss is None or loss.shape not in ((), (1,)):
        problem = f"returns a tensor of {list(loss.shape)}" if loss else "does not return a tensor"
        raise OptionError("loss_fn", problem, fix)
    if trains and not traced.has_backward:
        raise untrained_loss()
    if any(gradient is not None for gradient in traced.results.input_gradients):
        problem = "reads a tensor that requires grad and is not a parameter of the model"
        raise OptionError("loss_fn", problem, "make it a parameter of the model")
    for node in traced.nodes(Input):
        if op_of(node, Input).mutated and op_of(node, Input).held in ("", "?"):
            problem = "is written to by the step, and is not a buffer of the model"
            raise CaptureError(node.name, problem, "make it a buffer of the model, or write to a copy")


def warn_of_batch_statistics(model: nn.Module, traced: Program) -> None:
    """Warn if batch normalization uses the statistics of micro-batches."""
    written = {op_of(node, Input).held for node in traced.nodes(Input) if op_of(node, Input).mutated}
    for path, module in model.named_modules():
        if getattr(module, "track_running_stats", False) and f"{path}.running_mean" in written:
            text = f"{path}: {type(module).__name__} normalizes by the statistics of each micro-batch, not of the batch"
            warnings.warn(text, stacklevel=2)
            return  # one warning is enough


def _flags(model: nn.Module) -> dict[str, str]:
    """The mode of each module, and whether each parameter is trained or frozen, by path."""
    modes = {path: "training" if module.training else "evaluating" for path, module in model.named_modules()}
    trained = {name: "trained" if one.requires_grad else "frozen" for name, one in model.named_parameters()}
    return {**modes, **trained}


def _kinds(called: CallSpec) -> dict[str, str]:
    """The kind of each leaf of the arguments (dtype and shape, or value), by argument name and path within it."""
    found = {}
    for (of, place, *inner), leaf in leaves_by_path((called.args, dict(called.kwargs))):
        index = getattr(place, "idx", -1)
        known = called.arguments[index : index + 1] if getattr(of, "idx", 0) == 0 else ()
        name = known[0] if known else str(getattr(place, "key", index))
        found[name + "".join(map(str, inner))] = _kind(leaf)
    return found


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}"
    plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device))
    return repr(leaf) if plain else type(leaf).__name__


def microbatches_of(
    batch: tuple[Any, ...], named: dict[str, Any], count: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Split a batch into the arguments of `count` micro-batches, along dimension 0. Each gets all 0-d tensors.

    Raises:
        OptionError: the batch cannot be split.
    """
    tensors = [leaf for leaf in tree_leaves((batch, named)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        raise OptionError("batch", "has a tensor with requires_grad, which would get no gradient", "detach it")
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        problem = f"splits batches along dimension 0, and this batch has tensors of {sorted(sizes)} rows"
        raise OptionError("microbatches", problem, "give tensors with one row for each sample")
    if any(size % count for size in sizes):
        problem = f"is {count}, which does not divide a batch of {min(sizes)}"
        raise OptionError("microbatches", problem, "give batches of a multiple of this size")

    def part(number: int) -> Any:
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(count)[number] if tensor.dim() else tensor

        return tree_map_only(torch.Tensor, rows, (batch, named))

    return [part(number) for number in range(count)]


def digest_of(batch: tuple[Any, ...], named: dict[str, Any]) -> str:
    """A digest of the tensors of a batch."""
    found = hashlib.sha256()
    for leaf in tree_leaves((batch, named)):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
