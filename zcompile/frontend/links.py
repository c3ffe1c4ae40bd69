"""Links: the inputs of programs that autograd sees in place of parameters.

While the model is traced and called, its module tree has placeholders without memory. Code that walks `grad_fn` must
not find them as leaves or saved tensors, so programs are called with empty tensors, results of an autograd node.

In stage 0, and under `torch.compile`, users hold plain parameters, which autograd would consider unused:
`torch.autograd.grad(loss, parameters)` would run nothing and return None. A link makes one of the empty tensors depend
on them, so that the program's backward runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.torch_internals.autograd import have_post_accumulate_hooks


class Witness(nn.Parameter):
    """An empty leaf that users cannot name, so that only whole backwards request a gradient for it."""


class ParameterLink(torch.autograd.Function):
    """Returns an empty tensor that depends on `parameters`, with no gradient for them."""

    @staticmethod
    def forward(ctx: Any, witness: Witness, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=witness.device)

    @staticmethod
    def backward(ctx: Any, *_: object) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def without_placeholders(compiled: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """Return `compiled`, called with empty tensors for the placeholders at `positions`."""
    made: dict[int, torch.Tensor] = {}  # shared by all calls: torch guards on which parameters require gradients

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        if not made:
            trained = [position for position in positions if args[position].requires_grad]
            # On the parameters' device: autograd runs the node in the thread of that device, as it would run theirs.
            empty = torch.empty(0, device=args[positions[0]].device)
            made.update((position, empty) for position in positions)
            # A single node, which saves nothing that a backward would free; not views, which are copied when saved.
            values = torch.unsafe_split_with_sizes(Witness(empty), [0] * len(trained))
            made.update(zip(trained, values, strict=True))
        given = list(args)
        for position, value in made.items():
            if given[position].is_leaf:  # else it depends on plain parameters by a link
                given[position] = value
        return compiled(*given)

    return run if positions else compiled


def linked(
    compiled: Callable[..., Any], inputs: Sequence[Any], parameters: Mapping[int, nn.Parameter]
) -> Callable[..., Any]:
    """Return `compiled`, called with a link to those parameters among its inputs that are plain.

    `parameters`: the parameter of each placeholder among `inputs`, by the placeholder's `id`.
    """
    known = {index: parameters[id(value)] for index, value in enumerate(inputs) if id(value) in parameters}
    plain = [param for param in known.values() if param.requires_grad and not isinstance(param, DTensor)]
    if not plain:
        return compiled
    position = next(index for index, parameter in known.items() if parameter is plain[0])
    witness = Witness(torch.empty(0, device=plain[0].device))
    weak = [weakref.ref(parameter) for parameter in plain]  # Dynamo keeps `run` until `torch.compiler.reset()`
    del known, plain, parameters, inputs

    def run(*args: Any) -> Any:
        held = [parameter() for parameter in weak]
        # No link with these hooks: torch would call them also without a gradient.
        if torch.is_grad_enabled() and not have_post_accumulate_hooks(held):
            args = (*args[:position], ParameterLink.apply(witness, *held), *args[position + 1 :])
        return compiled(*args)

    return run
