"""Links: the way by which autograd finds plain parameters behind a program.

Programs are called with placeholders in the place of parameters. So autograd would take the plain parameters that
users hold in stage 0, and under `torch.compile`, for unused ones: `torch.autograd.grad(loss, parameters)` would run
nothing and give None. With a link one placeholder comes of them, so that the program's backward is asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zcompile._torch import have_post_accumulate_hooks


class ParameterLink(torch.autograd.Function):
    """Gives the placeholder that it is given, as one that comes of `parameters`, to which it brings no gradient.

    `witness`: a leaf that nobody can ask for, so that a gradient is wanted there by whole backwards alone.
    """

    @staticmethod
    def forward(ctx: Any, witness: nn.Parameter, placeholder: nn.Parameter, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return placeholder.view_as(placeholder)

    @staticmethod
    def backward(ctx: Any, *_: object) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def linked(
    compiled: Callable[..., Any], inputs: Sequence[Any], parameters: Mapping[int, nn.Parameter]
) -> Callable[..., Any]:
    """`compiled`, called with a link to the plain ones of the parameters that it is traced with.

    `parameters`: what a placeholder among `inputs` stands for, by its identity.
    """
    known = {place: parameters[id(value)] for place, value in enumerate(inputs) if id(value) in parameters}
    plain = [parameter for parameter in known.values() if type(parameter) is nn.Parameter and parameter.requires_grad]
    if not plain:
        return compiled
    place = next(place for place, parameter in known.items() if parameter is plain[0])
    witness = nn.Parameter(torch.empty(0))
    weak = [weakref.ref(parameter) for parameter in plain]  # Dynamo keeps this until `torch.compiler.reset()`
    del known, plain, parameters, inputs

    def run(*args: Any) -> Any:
        held = [parameter() for parameter in weak]
        # torch calls these hooks also where no gradient comes.
        if torch.is_grad_enabled() and not have_post_accumulate_hooks(held):
            made = ParameterLink.apply(witness, args[place], *held)
            args = (*args[:place], made, *args[place + 1 :])
        return compiled(*args)

    return run
