"""What the program of a step counts on, which was traced once and runs for what is as it was then; micro-batches."""

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

SAME_DATA = "let all ranks along 'pp' read the same data: samplers count the ranks along 'dp' alone"
"""What to do where ranks along the pipeline axis have other batches."""
_AGAIN = "make a new train step of the model as it is to be trained"


class StepGuard:
    """A model, and the first micro-batch that a step of it was traced with."""

    def __init__(self, model: nn.Module, called: CallSpec) -> None:
        self._model, self._tree, self._hooks = model, TreeWatch(model), HookWatch(model, itself=True)
        self._flags, self._text = _flags(model), self._hooks.text(0)
        self._batch = _kinds(called)

    def check(self, called: CallSpec) -> None:
        """Return if nothing has changed that was traced.

        Raises:
            OptionError: the batch has tensors of other shapes or dtypes, or other constants.
            ModelError: the model has other modules, modes, frozen parameters or hooks.
        """
        batch = _kinds(called)
        if batch != self._batch:
            names = [name for name in {**self._batch, **batch} if batch.get(name) != self._batch.get(name)]
            now, before = (
                ", ".join(f"{name} {kinds.get(name, 'left out')}" for name in names) for kinds in (batch, self._batch)
            )
            problem = f"has {now}, and its step was traced with {before}"
            fix = "give batches of one size, and what varies as a tensor; or make a train step for each"
            raise OptionError("batch", problem, fix)
        self.check_modules()
        flags = _flags(self._model)
        for name, flag in flags.items():
            if flag != self._flags.get(name):
                subject = name or type(self._model).__name__
                raise ModelError(subject, f"is {flag} now, and was {self._flags.get(name)} at the first step", _AGAIN)

    def check_modules(self) -> None:
        """Raise ModelError if the model has other modules or hooks than at the first step."""
        if self._tree.has_changed() or self._hooks.text(0) != self._text:
            raise ModelError(type(self._model).__name__, "has other modules or hooks than at the first step", _AGAIN)


def traced_with(model: nn.Module, called: CallSpec) -> str:
    """What an evaluation of a micro-batch is traced for, in lines."""
    lines = [f"{name}: {value}" for name, value in (*_kinds(called).items(), *_flags(model).items())]
    return "\n".join(lines)


def results_of(traced: Program) -> tuple[Any, ...]:
    """The results of a traced step that are not new values of buffers: the loss, and metrics."""
    return traced.results.outputs[len(written_results(traced)) :]


def check_traced(traced: Program, metrics: int = 0, *, trains: bool = True) -> None:
    """Return if a pipeline can run a traced step, or an evaluation, which gives so many metrics beside the loss.

    Raises:
        OptionError: what it gives is no loss that is trained, or something is trained that is no parameter.
        CaptureError: it writes to a tensor that is no buffer.
    """
    outputs, fix = results_of(traced), ONE_ELEMENT
    loss = data(outputs[0]).type if outputs and isinstance(outputs[0], fx.Node) else None
    if len(outputs) != 1 + metrics:
        fix += ", or the loss and a dict of tensors, which are metrics"
        raise OptionError("loss_fn", f"gives {len(outputs)} results", fix)
    if loss is None or loss.shape not in ((), (1,)):
        raise OptionError("loss_fn", f"gives a tensor of {list(loss.shape)}" if loss else "gives no tensor", fix)
    if trains and not traced.has_backward:
        raise untrained_loss()
    if any(gradient is not None for gradient in traced.results.input_gradients):
        problem = "computes with a tensor that is trained, and is no parameter of the model"
        raise OptionError("loss_fn", problem, "make it a parameter of the model")
    for node in traced.nodes(Input):
        if op_of(node, Input).mutated and op_of(node, Input).held in ("", "?"):
            problem = "is written to by the step, and is no buffer of the model"
            raise CaptureError(node.name, problem, "make it a buffer of the model, or write to a copy")


def warn_of_batch_statistics(model: nn.Module, traced: Program) -> None:
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


def _kinds(called: CallSpec) -> dict[str, str]:
    """What a micro-batch is made of, by the names of arguments and of places in them."""
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
    return repr(leaf) if plain else type(leaf).__name__  # of others torch.compile's guards tell


def microbatches_of(
    batch: tuple[Any, ...], named: dict[str, Any], count: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each of `count` micro-batches is given; tensors without dimensions are the same in all.

    Raises:
        OptionError: the batch cannot be cut.
    """
    tensors = [leaf for leaf in tree_leaves((batch, named)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        raise OptionError("batch", "has a tensor with requires_grad, which would get no gradient", "detach it")
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        problem = f"cuts batches along dimension 0, and tensors of this one have {sorted(sizes)} rows"
        raise OptionError("microbatches", problem, "let all that loss_fn is given have a row for each sample")
    if any(size % count for size in sizes):
        problem = f"is {count}, which does not divide a batch of {min(sizes)}"
        raise OptionError("microbatches", problem, "give batches that it divides")

    def part(number: int) -> Any:
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(count)[number] if tensor.dim() else tensor

        return tree_map_only(torch.Tensor, rows, (batch, named))

    return [part(number) for number in range(count)]


def digest_of(batch: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Of the values of a batch."""
    found = hashlib.sha256()
    for leaf in tree_leaves((batch, named)):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
