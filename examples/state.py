"""What training keeps in memory on one rank, in bytes: measured, and by the formula of its stage.

Ψ is the number of parameters and N the number of ranks. In fp32 with Adam each parameter costs
16 bytes: 4 for itself, 4 for its gradient, 8 for the two moments.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Formula:
    """Bytes for each parameter that one rank keeps under a ZeRO stage."""

    state: int  # parameter, gradient and moments, before they are shared out
    shared: bool  # whether the N ranks share the state out
    copy: int  # of the whole parameters, which the program keeps beside its shards

    def __str__(self) -> str:
        return f"{self.state}Ψ/N" if self.shared else f"{self.state}Ψ"

    def bytes(self, parameters: int, ranks: int) -> int:
        """Bytes of state on one rank of `ranks`, of a model of `parameters` parameters; without the copy."""
        return self.state * parameters // (ranks if self.shared else 1)


def formula(stage: int) -> Formula:
    """Stage 0 shares nothing; 1, 2 and 3 share the state, and 1 and 2 keep a whole copy of the parameters for use."""
    return Formula(state=16, shared=stage > 0, copy=4 if stage in (1, 2) else 0)


def held_bytes(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Bytes this rank holds in parameters, their gradients and the optimizer's state.

    Shards count, not the tensors they are shards of. What lives inside the program is not seen here.
    """
    tensors = [*with_gradients(parameters), *optimizer_tensors(optimizer)]
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))


def with_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """The parameters, each followed by its gradient if it has one."""
    for parameter in parameters:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All tensors the optimizer keeps from step to step."""
    for kept in optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, Tensor))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
