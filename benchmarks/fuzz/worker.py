"""One rank of `benchmarks.fuzz`: trains case after case through zcompile and compares with what the oracle gives."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zcompile
from benchmarks.common.rank import Place, joined
from benchmarks.fuzz.cases import DISK, Case, Task, Verdict
from benchmarks.fuzz.models import BREAKING, heads_of, make_model
from benchmarks.fuzz.oracle import (
    CLIP,
    Step,
    Values,
    backward,
    batch_of,
    called,
    change_settings,
    evaluating,
    loss_of,
    make_optimizer,
    picked,
    redraw,
    saves_before,
    steps_of,
)
from zcompile.torch_internals.dynamo import BackendCompilerFailed

Found = Mapping[str, Tensor | None]


class WrongError(Exception):
    """A value that is not the oracle's."""

    def __init__(self, what: str, where: str) -> None:
        self.what = what
        super().__init__(f"{what}: {where}")


def judge(task: Task) -> Verdict:
    """Run a case on this rank. Collective."""
    try:
        wanted = steps_of(task.case)
    except Exception:
        return Verdict("void", "PyTorch", traceback.format_exc())
    torch.compiler.reset()  # checkpoints and autocast of the oracle have left nothing that a first call would not have
    comparison = Comparison(task)
    try:
        subject = SUBJECTS[task.case.way](task)
        for number, step in enumerate(wanted):
            subject.step(number, step, comparison)
        subject.explain()
    except WrongError as error:
        return Verdict("wrong", error.what, str(error))
    except Exception as error:
        # torch.compile wraps what its backends raise.
        cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        refused = isinstance(cause, zcompile.ZcompileError) and not _wrongly(task, cause)
        return Verdict("refused" if refused else "crash", _message(cause), traceback.format_exc())
    return Verdict("right", bits=comparison.bits)


def _wrongly(task: Task, error: Exception) -> bool:
    """Whether ranks are said to be gone, or out of step though nothing lets them differ; or a pass has failed.

    They may differ where data choose what they run, or where losses of some leave out whole programs of a model that
    runs as several.
    """
    case, spec = task.case, repr(task.case.spec)
    may_differ = "kind='routed'" in spec or (case.lopsided and any(kind in spec for kind in BREAKING))
    if isinstance(error, zcompile.AgreementError):
        # These two tell of a rank that has refused: its own verdict counts.
        return not may_differ and "has none" not in error.problem and "failed there" not in error.problem
    return isinstance(error, (zcompile.GroupError, zcompile.PipelineError, zcompile.ProgramError))


def _message(error: Exception) -> str:
    """The kind of an error and what it says, without the name that it says it of, and without numbers."""
    said = error.problem if isinstance(error, zcompile.ZcompileError) else str(error)
    first = next(iter(said.strip().splitlines()), "")
    return re.sub(r"\d+(\.\d+)?( [KM]i)?", "N", f"{type(error).__name__}: {first}")


# -- comparing ------------------------------------------------------------------------------------------------------


class Comparison:
    """Compares with the oracle, up to the rounding of the case."""

    def __init__(self, task: Task) -> None:
        case = task.case
        self.rank, self.bits = task.rank, True
        self.tolerance = 5e-2 if "dtype" in case.options else 1e-9 if case.spec.double else 2e-4

    def tensors(self, what: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        """Raise WrongError where one differs."""
        if len(got) != len(want):
            raise WrongError(what, f"{len(got)} in place of {len(want)}")
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            self._tensor(what, str(number), one, other)

    def values(self, what: str, got: Found, want: Values) -> None:
        """Raise WrongError where one differs. Collective, for values that are shards."""
        self._which(what, got, want)
        for name, right in want.items():
            if right is not None:
                value = full(got[name])
                self._tensor(what, name, value, right)

    def _which(self, what: str, got: Found, want: Values) -> None:
        """Compare which are None, in ranks first: what only some of them have cannot be gathered."""
        mine = [name for name in want if got.get(name) is not None]
        all_of: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of, mine)
        if any(other != mine for other in all_of):
            names = sorted({name for one in all_of for name in one} - set.intersection(*map(set, all_of)))
            raise WrongError(f"{what}: on some ranks only", str(names))
        for name in mine:
            if want[name] is None:
                zeros = not full(got[name]).any()
                raise WrongError(f"{what}: {'zeros' if zeros else 'one'} where None is right", name)
        if missing := [name for name, right in want.items() if right is not None and name not in mine]:
            raise WrongError(f"{what}: None where one is right", str(missing))

    def _tensor(self, what: str, name: str, got: Tensor, want: Tensor) -> None:
        if got.shape != want.shape or got.dtype != want.dtype:
            problem = f"{got.dtype} {list(got.shape)} in place of {want.dtype} {list(want.shape)}"
            raise WrongError(what, f"{name} is {problem}")
        if torch.equal(got, want):
            return
        self.bits = False
        distance, largest = (got - want).abs().max().item(), want.abs().max().item()
        if not distance <= self.tolerance * (1 + largest):
            raise WrongError(
                what, f"{name} differs by {distance:.3g} where the largest is {largest:.3g}, rank {self.rank}"
            )


def full(value: Tensor | None) -> Tensor:
    """The whole of a shard."""
    assert value is not None
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


# -- what is trained ------------------------------------------------------------------------------------------------


class Subject(ABC):
    """A model that zcompile trains, in the way of its case."""

    def __init__(self, task: Task) -> None:
        self.task, self.case, self.rank = task, task.case, task.rank
        self.model = make_model(task.case.spec, self.seed)
        self.start()

    @property
    def seed(self) -> int:
        """Another one on other ranks: the first rank's values win."""
        return self.rank

    @abstractmethod
    def start(self) -> None:
        """Compile `self.model`."""

    def options(self) -> dict[str, Any]:
        given = dict(self.case.options)
        if "dtype" in given:
            given["dtype"] = getattr(torch, given["dtype"])
        folder = f"disk:{self.task.folder}"
        return {name: folder if value == DISK else value for name, value in given.items()}

    @abstractmethod
    def called(self) -> Callable[..., Any]:
        """What is called with a batch."""

    @abstractmethod
    def module(self) -> nn.Module:
        """That which has modes, parameters and buffers."""

    def weights(self) -> Found:
        return dict(self.module().named_parameters())

    @abstractmethod
    def explain(self) -> None:
        """Ask for a page of text."""

    def step(self, number: int, want: Step, comparison: Comparison) -> None:
        """Take a step, and compare what it gives."""
        if self.case.redraw:
            redraw(self.case, self.module().parameters(), number)
        if self.case.evaluate:
            with evaluating(self.case, self.module()):
                batch, _ = batch_of(self.case, self.rank, number, -1)
                given = heads_of(called(self.case, self.called(), batch))
            comparison.tensors("evaluation", given, want.evaluations[self.rank])
        self.train(number, want, comparison)
        comparison.values("weights", self.weights(), want.weights)
        comparison.values("buffers", dict(self.module().named_buffers()), want.buffers[self.rank])

    @abstractmethod
    def train(self, number: int, want: Step, comparison: Comparison) -> None:
        """One step, compared with what it should be."""


class Loop(Subject):
    """The loop, around what `zcompile.compile` gives."""

    def start(self) -> None:
        case = self.case
        early = make_optimizer(case, self.model.parameters()) if case.early else None
        self.compiled = zcompile.compile(self.model, optimizer=early, **self.options())
        self.optimizer = early or make_optimizer(case, self.compiled.parameters())

    def module(self) -> nn.Module:
        return self.compiled

    def called(self) -> Callable[..., Any]:
        return self.compiled

    def explain(self) -> None:
        self.compiled.explain()

    def step(self, number: int, want: Step, comparison: Comparison) -> None:
        if saves_before(self.case, number):
            self.save()
        super().step(number, want, comparison)

    def train(self, number: int, want: Step, comparison: Comparison) -> None:
        case = self.case
        losses = []
        for micro in range(case.micro):
            with self.holding_back(micro):
                losses.append(backward(case, self.called(), self.rank, number, micro))
        comparison.tensors("loss", losses, want.losses[self.rank])
        if case.clip:
            nn.utils.clip_grad_norm_(self.module().parameters(), CLIP)
        change_settings(case, self.optimizer, number)
        self.optimizer.step()  # which refuses gradients that nobody has averaged, so they are compared behind it
        comparison.values("gradients", {n: p.grad for n, p in self.module().named_parameters()}, want.gradients)
        self.optimizer.zero_grad(set_to_none=not case.keep)

    def holding_back(self, micro: int) -> contextlib.AbstractContextManager[None]:
        last = micro == self.case.micro - 1
        return self.compiled.no_sync() if self.case.no_sync and not last else contextlib.nullcontext()

    def save(self) -> None:
        """Take the state through what the case says."""
        before, optimizer = self.compiled, self.optimizer
        match self.case.save:
            case "checkpoint":
                before.save_checkpoint(self.task.folder / "checkpoint", optimizer).result()
                self._again((self.case.options["stage"] + 1) % 4)
                self.compiled.load_checkpoint(self.task.folder / "checkpoint", self.optimizer)
            case "state_dict":
                self._again(self.case.options["stage"])
                self.compiled.load_state_dict(before.state_dict())
                self.optimizer.load_state_dict(optimizer.state_dict())
            case "full":
                before.load_full_state_dict(before.full_state_dict(rank0_only=False))

    def _again(self, stage: int) -> None:
        """A new model with other values, in another stage."""
        kept = {n: v for n, v in self.case.options.items() if stage or n != "offload_parameters"}
        self.case = replace(self.case, options={**kept, "stage": stage})
        self.model = make_model(self.case.spec, 7)
        self.start()


class TrainStep(Subject):
    """`zcompile.train_step`."""

    def start(self) -> None:
        case = self.case
        optimizer = make_optimizer(case, self.model.parameters())
        clip = CLIP if case.clip else None
        options = self.options()
        step = zcompile.train_step(self.model, self._loss, optimizer, clip_grad_norm=clip, **options)
        assert isinstance(step, zcompile.TrainStep), "no mesh has a pipeline axis"
        self.trained = step

    def _loss(self, model: Any, batch: Any, targets: Sequence[Tensor], heads: Sequence[int]) -> Tensor:
        return loss_of(self.case, called(self.case, model, batch, heads), targets, heads)

    def module(self) -> nn.Module:
        return self.trained.model

    def called(self) -> Callable[..., Any]:
        return self.trained.model

    def explain(self) -> None:
        self.trained.model.explain()

    def train(self, number: int, want: Step, comparison: Comparison) -> None:
        batch, targets = batch_of(self.case, self.rank, number, 0)
        change_settings(self.case, self.trained.optimizers[0], number)
        loss = self.trained(batch, targets, picked(self.case, self.rank, number))
        comparison.tensors("loss", [loss], want.losses[self.rank])


class Backend(Loop):
    """The loop, around what `torch.compile` gives."""

    @property
    def seed(self) -> int:
        """What no graph reads is not the first rank's."""
        return 0

    def start(self) -> None:
        self.optimizer = make_optimizer(self.case, self.model.parameters())
        self.backend = zcompile.backend(**self.options())
        self.function = torch.compile(self.model, backend=self.backend)
        self.dtype = self.options().get("dtype")

    def module(self) -> nn.Module:
        return self.model

    def called(self) -> Callable[..., Any]:
        """Under autocast, as what Dynamo does not compile wants it beside graphs in another dtype."""
        return self.function if self.dtype is None else torch.autocast("cpu", self.dtype)(self.function)

    def weights(self) -> Found:
        """A state dict shows the shards."""
        state = self.model.state_dict()
        return {name: state[name] for name, _ in self.model.named_parameters()}

    def explain(self) -> None:
        if self.backend.shards():  # Dynamo has compiled anything that reads parameters
            self.backend.explain()

    def holding_back(self, micro: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


SUBJECTS: dict[str, Callable[[Task], Subject]] = {"loop": Loop, "train_step": TrainStep, "backend": Backend}


# -- serving --------------------------------------------------------------------------------------------------------


class Judge:
    """A rank that tries one case after the other."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank = int(os.environ["RANK"])

    def ready(self) -> None:
        """The imports are done."""

    def judge(self, case: Case, folder: Path, timeout: float) -> Verdict | None:
        """The verdict on a case; None of one that has fewer ranks."""
        if self.rank >= case.world:
            return None
        try:
            with joined(Place(self.rank, case.world, str(folder / "store"), timeout, "cpu")) as meet:
                meet()
                return judge(Task(case, self.rank, folder))
        finally:
            torch.compiler.reset()
            gc.collect()
