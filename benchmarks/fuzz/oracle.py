"""What a case of `benchmarks.fuzz` must give, by plain eager PyTorch: a model for each rank, all in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz.cases import Case
from benchmarks.fuzz.models import heads_of, make_batch, make_model

Values = dict[str, Tensor | None]
CLIP = 0.1
LARGEST = 1e3
"""What models in lower precision may give: targets are of the size of one."""


def make_optimizer(case: Case, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With decay, so that a gradient of zeros moves a weight; with an eps, so that rounding does not."""
    match case.optimizer:
        case "adamw":
            return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3)
        case "adagrad":
            return torch.optim.Adagrad(params, lr=1e-2, weight_decay=0.01, eps=1e-3)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def batch_of(case: Case, rank: int, step: int, part: int) -> tuple[Any, list[Tensor]]:
    """The batch of a rank: `part` counts micro-batches and forwards, and is -1 in an evaluation."""
    rows = case.rows[(rank + step) % len(case.rows)]
    length = case.lengths[(rank + step + max(part, 0)) % len(case.lengths)]
    return make_batch(case.spec, f"{rank} {step} {part}", rows, length)


def change_settings(case: Case, optimizer: torch.optim.Optimizer, step: int) -> None:
    """What a scheduler does before an optimizer's step."""
    for group in optimizer.param_groups if case.settings else ():
        group["lr"] *= 0.7
        group["weight_decay"] = 0.05 * (step % 2)


@torch.no_grad()
def redraw(case: Case, params: Iterable[nn.Parameter], step: int) -> None:
    """What the case writes to parameters before a step; all ranks draw the same numbers."""
    torch.manual_seed(7)
    for param in params if step == 1 else ():
        match case.redraw:
            case "noise":
                param.add_(torch.randn_like(param), alpha=0.1)
            case "init":
                nn.init.uniform_(param, -0.5, 0.5)
            case "data":
                param.data.copy_(torch.rand_like(param.data) - 0.5)
            case "mask":
                param.mul_(torch.bernoulli(torch.full_like(param, 0.7)))


def picked(case: Case, rank: int, step: int) -> tuple[int, ...]:
    """The heads that this rank's loss reads in this step."""
    return case.picks[(step + (rank if case.lopsided else 0)) % len(case.picks)]


def called(case: Case, model: Callable[..., Any], batch: Any, heads: Sequence[int] | None = None) -> Any:
    """The outputs of a call, for a loss that reads `heads`.

    They are asked for by a text: of integers that vary Dynamo makes symbols, of which `number in heads` is wrong.
    """
    return model(batch, heads="".join(map(str, heads))) if case.asks and heads is not None else model(batch)


def loss_of(case: Case, outputs: Any, targets: Sequence[Tensor], heads: Sequence[int]) -> Tensor:
    """The mean over the heads' errors, each by itself."""
    given = heads_of(outputs)
    pairs = [(given[index if case.asks else head], targets[head]) for index, head in enumerate(heads)]
    losses = [F.mse_loss(output.to(target.dtype), target) for output, target in pairs]
    return torch.stack(losses).sum()


@contextlib.contextmanager
def evaluating(case: Case, model: nn.Module) -> Iterator[None]:
    """In which an evaluation runs."""
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "eval": torch.no_grad}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which is not traced, and rounds otherwise
    if case.evaluate == "eval":
        model.eval()
    with modes.get(case.evaluate, contextlib.nullcontext)():
        yield
    if case.evaluate == "eval":
        model.train()
    torch.backends.mha.set_fastpath_enabled(fast)


def parts(case: Case, micro: int) -> range:
    """The numbers of the batches that one micro-batch is made of."""
    return range(micro * case.forwards, (micro + 1) * case.forwards)


def backward(case: Case, model: Callable[..., Any], rank: int, step: int, micro: int) -> Tensor:
    """The backward of a micro-batch, once or twice; gives its loss."""
    heads, losses = picked(case, rank, step), []
    for part in parts(case, micro):
        batch, targets = batch_of(case, rank, step, part)
        losses.append(loss_of(case, called(case, model, batch, heads), targets, heads))
    loss = torch.stack(losses).sum()
    if case.retain:
        loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


class Rank:
    """The model of one rank, and what it does by itself."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.model = make_model(case.spec, 0)
        self.optimizer = make_optimizer(case, self.model.parameters())

    def evaluate(self, step: int) -> list[Tensor]:
        with evaluating(self.case, self.model):
            batch, _ = batch_of(self.case, self.rank, step, -1)
            given: list[Tensor] = self._in_precision(lambda: heads_of(called(self.case, self.model, batch)))
            return given

    def backwards(self, step: int) -> list[Tensor]:
        """The losses, their gradients summed into `.grad`."""
        return [
            self._in_precision(partial(backward, self.case, self.model, self.rank, step, micro))
            for micro in range(self.case.micro)
        ]

    def _in_precision(self, run: Callable[[], Any]) -> Any:
        """Under autocast, with parameters rounded to its dtype but for those of batch normalisation."""
        if "dtype" not in self.case.options:
            return run()
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(_Whole(self.model, run), self._rounded(), (), tie_weights=False)

    def _rounded(self) -> dict[str, Tensor]:
        """By name, once for each place in a module: in modules of two names torch would leave rounded ones behind."""
        rounded, found = dict[nn.Parameter, Tensor](), dict[str, Tensor]()
        for prefix, module in self.model.named_modules(prefix="model"):
            if not isinstance(module, nn.BatchNorm1d):
                for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                    found[f"{prefix}.{name}"] = rounded.setdefault(param, param.to(torch.bfloat16))
        return found


class _Whole(nn.Module):
    """A module whose call is whatever is done with `model`, the backward too."""

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self) -> Any:
        return self.run()


@dataclass(frozen=True)
class Step:
    """What a step must give; lists are by rank."""

    evaluations: list[list[Tensor]]
    losses: list[list[Tensor]]
    gradients: Values
    """Of all ranks, as the optimizer reads them."""
    weights: Values
    """After the update."""
    buffers: list[Values]


def steps_of(case: Case) -> list[Step]:
    """All steps of a case: each rank's gradients one after the other, averaged.

    Raises:
        ValueError: not all numbers are finite, or training in lower precision diverges.
        Others: whatever PyTorch raises of such a model.
    """
    ranks = [Rank(case, rank) for rank in range(case.world)]
    return [_step(case, ranks, step) for step in range(case.steps)]


def _step(case: Case, ranks: Sequence[Rank], step: int) -> Step:
    if saves_before(case, step):
        _save(case, ranks)
    for rank in ranks:
        redraw(case, rank.model.parameters(), step)
    evaluations = [rank.evaluate(step) for rank in ranks] if case.evaluate else []
    losses = [rank.backwards(step) for rank in ranks]
    _average(ranks)
    for rank in ranks:
        if case.clip:
            nn.utils.clip_grad_norm_(rank.model.parameters(), CLIP)
        change_settings(case, rank.optimizer, step)
        rank.optimizer.step()
    gradients = {name: _copy(param.grad) for name, param in ranks[0].model.named_parameters()}
    for rank in ranks:
        rank.optimizer.zero_grad(set_to_none=not case.keep)
    weights = {name: _copy(param) for name, param in ranks[0].model.named_parameters()}
    buffers = [{name: _copy(buffer) for name, buffer in rank.model.named_buffers()} for rank in ranks]
    if not all(value.isfinite().all() for value in (*gradients.values(), *weights.values()) if value is not None):
        raise ValueError("this model's numbers are not finite")
    shown = [*weights.values(), *(value for given in evaluations for value in given)]
    if "dtype" in case.options and any(value.abs().max() > LARGEST for value in shown if value is not None):
        raise ValueError("this model's training diverges, and its rounding with it")
    return Step(evaluations, losses, gradients, weights, buffers)


def saves_before(case: Case, step: int) -> bool:
    """True where the state goes through what `save` says before this step."""
    return bool(case.save) and step == case.steps - 1


def _average(ranks: Sequence[Rank]) -> None:
    """Average gradients over the ranks; None stays what is None on each of them."""
    for params in zip(*(rank.model.parameters() for rank in ranks), strict=True):
        given = [param.grad for param in params]
        if any(grad is not None for grad in given):
            total = sum(torch.zeros_like(params[0]) if grad is None else grad for grad in given)
            for param in params:
                param.grad = torch.div(total, len(params))


def _save(case: Case, ranks: Sequence[Rank]) -> None:
    """What a state does not bring back: gradients, in another model, and other buffers than the first rank's."""
    if case.save != "full":
        for rank in ranks:
            rank.model.zero_grad()
        return
    first = dict(ranks[0].model.named_buffers())
    for rank in ranks[1:]:
        for name, buffer in rank.model.named_buffers():
            buffer.copy_(first[name])


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()
