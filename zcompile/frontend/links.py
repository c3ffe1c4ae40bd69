"""Links: what autograd finds behind a program in the place of its parameters.

The module tree has placeholders while it is traced and called, which have no memory. Code that walks `grad_fn` must not
meet one, be it as a leaf or as a saved tensor: programs are called with empty tensors, behind a node.

In stage 0, and under `torch.compile`, users hold plain parameters, which autograd would take for unused:
`torch.autograd.grad(loss, parameters)` would run nothing and give None. With a link one of the empty tensors comes of
them, so that the program's backward is asked.
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
    """An empty leaf that nobody can ask for, so that a gradient is wanted there by whole backwards alone."""


class ParameterLink(torch.autograd.Function):
    """Gives an empty tensor as what comes of `parameters`, to which it brings no gradient."""

    @staticmethod
    def forward(ctx: Any, witness: Witness, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=witness.device)

    @staticmethod
    def backward(ctx: Any, *_: object) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def without_placeholders(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """`compiled`, called with empty tensors for the placeholders at `places`."""
    made: dict[int, torch.Tensor] = {}  # for all calls: torch guards on which parameters are trained

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        if not made:
            trained = [place for place in places if args[place].requires_grad]
            # Where parameters are: autograd runs the node in the thread of that device, as it would run theirs.
            empty = torch.empty(0, device=args[places[0]].device)
            made.update((place, empty) for place in places)
            # One node for all, which saves nothing that a backward would free, and no views, which are copied to save.
            values = torch.unsafe_split_with_sizes(Witness(empty), [0] * len(trained))
            made.update(zip(trained, values, strict=True))
        given = list(args)
        for place, value in made.items():
            if given[place].is_leaf:  # else it comes of plain parameters
                given[place] = value
        return compiled(*given)

    return run if places else compiled


def linked(
    compiled: Callable[..., Any], inputs: Sequence[Any], parameters: Mapping[int, nn.Parameter]
) -> Callable[..., Any]:
    """`compiled`, called with a link to the plain ones of the parameters that it is traced with.

    `parameters`: what a placeholder among `inputs` stands for, by its identity.
    """
    known = {place: parameters[id(value)] for place, value in enumerate(inputs) if id(value) in parameters}
    plain = [param for param in known.values() if param.requires_grad and not isinstance(param, DTensor)]
    if not plain:
        return compiled
    place = next(place for place, parameter in known.items() if parameter is plain[0])
    witness = Witness(torch.empty(0, device=plain[0].device))
    weak = [weakref.ref(parameter) for parameter in plain]  # Dynamo keeps this until `torch.compiler.reset()`
    del known, plain, parameters, inputs

    def run(*args: Any) -> Any:
        held = [parameter() for parameter in weak]
        # torch calls these hooks also where no gradient comes.
        if torch.is_grad_enabled() and not have_post_accumulate_hooks(held):
            args = (*args[:place], ParameterLink.apply(witness, *held), *args[place + 1 :])
        return compiled(*args)

    return run
