"""What loops do by rights: every rank a plain model of its own, gradients averaged where the same backwards meet.

A backward of one rank belongs to that of another if both are the n-th of their kind since equally many optimizer steps,
of the same path through the model and with equal parameters. Where they do not, or one never comes, what the ranks
did until there is all that is right.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.faults.loop import ENDS, FORWARDS, NORM, Op, make_model, make_optimizer, set_otherwise

Grads = list[torch.Tensor]
TOLERANCE = 1e-5


@dataclass
class Expected:
    """What a rank sees if all is right: parameters after each optimizer step, and what each operation gives."""

    steps: list[Grads] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, Grads] = field(default_factory=dict)
    complete: bool = False
    """All operations have run."""


@dataclass(frozen=True)
class Meeting:
    """A rank at a backward that averages."""

    label: tuple[int, int, str]
    parameters: Grads
    gradients: Grads


Replica = Generator[Meeting, Grads, None]


def simulate(scripts: Sequence[Sequence[Op]], *, sharded_gradients: bool) -> list[Expected]:
    """Run each rank's operations as far as they are right."""
    expected = [Expected() for _ in scripts]
    replicas = [
        _Replica(rank, sharded_gradients, seen).run(script)
        for rank, (script, seen) in enumerate(zip(scripts, expected, strict=True))
    ]
    meetings = [next(replica, None) for replica in replicas]
    while all(meetings) and _match([meeting for meeting in meetings if meeting]):
        averages = [torch.stack(parts).mean(0) for parts in zip(*(m.gradients for m in meetings if m), strict=True)]
        meetings = [_sent(replica, averages) for replica in replicas]
    return expected


def _sent(replica: Replica, averages: Grads) -> Meeting | None:
    try:
        return replica.send(averages)
    except StopIteration:
        return None


def _match(meetings: Sequence[Meeting]) -> bool:
    first, *others = meetings
    return all(other.label == first.label and close(other.parameters, first.parameters) for other in others)


def close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether the values are the same, whatever the shapes of what has none."""
    pairs = [(a.flatten(), b.flatten()) for a, b in zip(found, expected, strict=True)]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in pairs)


class _Replica:
    """A rank on plain PyTorch."""

    def __init__(self, rank: int, sharded_gradients: bool, seen: Expected) -> None:
        self.rank, self.sharded_gradients, self.seen = rank, sharded_gradients, seen
        self.model = make_model()
        self.params: list[nn.Parameter] = list(self.model.parameters())
        self.optimizer = make_optimizer(self.model)
        self.graphs: list[tuple[torch.Tensor, str, Grads]] = []
        self.held: Grads | None = None
        self.steps = self.backwards = 0

    def run(self, script: Sequence[Op]) -> Replica:
        """Every operation until one that ends the rank, or that plain PyTorch refuses."""
        for op in script:
            if op.letter in ENDS:
                return
            try:
                yield from self._do(op)
            except (RuntimeError, IndexError):  # the user's own mistake: a freed graph, changed parameters, no graph
                return
        self.seen.complete = True

    def _do(self, op: Op) -> Replica:
        match op.letter:
            case "B" | "R":
                loss, path, before = self.graphs[-1]
                yield from self._backward(loss, path, before)
                if op.letter == "B":
                    self.graphs.pop()
            case "A":
                yield from self._micro_batch(op)
            case "T":
                self._forward(op)
                yield from self._backward(*self.graphs.pop())
                self._step()
                self.optimizer.zero_grad()
            case letter if letter in FORWARDS:
                self._forward(op)
            case _:
                self._alone(op)

    def _alone(self, op: Op) -> None:
        """What needs no other rank."""
        match op.letter:
            case "E" | "V":
                with torch.no_grad():
                    self.seen.losses[op.place] = float(self.model(*op.batch(self.rank)))
            case "S":
                self._step()
            case "Z":
                self.optimizer.zero_grad()
                self.held = None
            case "Y" | "y":
                set_otherwise(self.optimizer, op.letter)
            case "D":
                self.seen.states[op.place] = self._values()
            case "G":
                nn.utils.clip_grad_norm_(self.params, NORM)

    def _forward(self, op: Op) -> None:
        loss = self.model(*op.batch(self.rank), op.path)
        self.seen.losses[op.place] = float(loss.detach())
        self.graphs.append((loss, op.path if op.path == "past" else "", self._values()))

    def _micro_batch(self, op: Op) -> Replica:
        loss = self.model(*op.batch(self.rank))
        if self.sharded_gradients:
            yield from self._backward(loss, "", self._values())
        else:
            grads = torch.autograd.grad(loss, self.params)
            self.held = [a + b for a, b in zip(grads, self.held, strict=True)] if self.held else list(grads)

    def _backward(self, loss: torch.Tensor, path: str, before: Grads) -> Replica:
        used: Sequence[torch.Tensor | None] = torch.autograd.grad(
            loss, self.params, retain_graph=True, allow_unused=True
        )
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, used, strict=True)]
        if self.held:
            grads, self.held = [a + b for a, b in zip(grads, self.held, strict=True)], None
        averages = yield Meeting((self.steps, self.backwards, path), before, grads)
        self.backwards += 1
        for param, average in zip(self.params, averages, strict=True):
            param.grad = average.clone() if param.grad is None else param.grad + average

    def _step(self) -> None:
        if self.held:
            raise RuntimeError("gradients are held back")
        self.optimizer.step()
        self.steps, self.backwards = self.steps + 1, 0
        self.seen.steps.append(self._values())

    def _values(self) -> Grads:
        return [param.detach().clone() for param in self.params]
