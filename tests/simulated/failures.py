"""Steps that fail half-way, as where memory runs out: what they leave on its way must not harm the steps behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from zcompile.runtime.backend_collectives import BackendCollectives
from zcompile.runtime.gradients.local_steps import LocalSteps


class FailedStepError(RuntimeError):
    """What a step raises that is made to fail."""


@dataclass(frozen=True)
class Fault:
    """Call number `call` of `method` raises, the first being 0."""

    owner: type
    method: str
    call: int


FAULTS = {
    "gather": Fault(BackendCollectives, "all_gather_many", 2),
    "gather of the backward": Fault(BackendCollectives, "all_gather_many", 5),
    "reduction": Fault(BackendCollectives, "reduce_scatter_many", 2),
    "update": Fault(LocalSteps, "begin", 2),
}
"""By what scenarios call them. Five units are gathered in the forward, and reduced in the backward."""


@contextmanager
def failing(name: str) -> Iterator[None]:
    """Inside, the fault of this name raises `FailedStepError`, once."""
    fault = FAULTS[name]
    works: Callable[..., Any] = getattr(fault.owner, fault.method)
    calls = itertools.count()

    def call(*args: Any, **named: Any) -> Any:
        if next(calls) == fault.call:
            raise FailedStepError(name)
        return works(*args, **named)

    with mock.patch.object(fault.owner, fault.method, call):
        yield
    assert next(calls) > fault.call, f"no step came to the {name} that is to fail"
