"""One rank of the matrix: trains cell after cell, each beside the same loop under DistributedDataParallel."""

from __future__ import annotations

import gc
import os
import traceback
from pathlib import Path

import torch

import zcompile
from benchmarks.common.rank import Place, joined
from benchmarks.families.cells import CELLS, WITHOUT, Outcome
from benchmarks.families.family import Family, find
from benchmarks.families.loops import loop_of
from benchmarks.families.recorder import Recorder, distance
from zcompile.torch_internals.dtensor import forget_meshes
from zcompile.torch_internals.dynamo import BackendCompilerFailed

OWN_MISTAKES = (zcompile.GroupError, zcompile.PipelineError, zcompile.ProgramError, zcompile.ProofError)
"""Errors that no model should be able to cause."""


class References:
    """What DistributedDataParallel gives for a family and a loop, trained once for all cells of both."""

    def __init__(self) -> None:
        self._key, self._found = ("", ""), Recorder()

    def of(self, family: Family, loop: str) -> Recorder:
        """Train it, or take what the last call gave. Collective."""
        shared = "plain" if loop in ("compiled", "traced") else loop
        if self._key != (family.name, shared):
            if _draws(family):
                raise ValueError("its loss draws random numbers: switch off its dropout")
            start = Recorder().end(family.models())
            found = loop_of(shared, None)(family)
            if not all(torch.isfinite(loss).all() for loss in found.losses):
                raise ValueError("a loss is not finite")
            if all(map(torch.equal, start.state.values(), found.state.values())):
                raise ValueError("nothing was trained")
            self._key, self._found = (family.name, shared), found
        return self._found


def _draws(family: Family) -> bool:
    """Whether a loss is random, so that no two runs could be compared."""
    models = family.models()
    before = torch.get_rng_state()
    family.phases[0].loss(models, family.batches(0)[0])
    return not torch.equal(before, torch.get_rng_state())


def run(name: str, family: Family, references: References) -> Outcome:
    """Train a cell on this rank, and compare. Collective."""
    cell = CELLS[name]
    try:
        wanted = references.of(family, cell.loop)
    except Exception as error:
        return Outcome("void", _first_line(error), trace=traceback.format_exc())
    torch.compiler.reset()
    try:
        found = loop_of(cell.loop, cell.options)(family)
        far, where = distance(found, wanted)
    except Exception as error:
        return Outcome("void", _first_line(error)) if cell.loop == WITHOUT else _failed(error)
    kind = "bits" if far == 0 else "distance"
    return Outcome(kind, where, far, found.seconds)


def _failed(error: Exception) -> Outcome:
    # torch.compile wraps what its backends raise.
    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    if isinstance(cause, zcompile.ZcompileError) and not isinstance(cause, OWN_MISTAKES):
        alone = isinstance(cause, zcompile.AgreementError) and "has none" in cause.problem
        return Outcome("lost" if alone else "refused", " ".join(str(cause).split()), trace=traceback.format_exc())
    lost = "gloo" in str(cause).lower() or "Connection closed" in str(cause)
    return Outcome("lost" if lost else "crash", _first_line(cause), trace=traceback.format_exc())


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


class Matrix:
    """A rank that trains one cell after the other, each within a process group of its own."""

    def __init__(self) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "ACCELERATE_USE_CPU": "true"}
        self.rank, self.references = int(os.environ["RANK"]), References()

    def ready(self) -> None:
        """The imports are done, which are no part of a cell."""

    def run(self, name: str, cell: str, store: Path, patience: float) -> Outcome:
        """A cell of a family; what fails costs this one alone."""
        try:
            with joined(Place(self.rank, 2, str(store), patience, "cpu")) as meet:
                meet()
                family = find(name)
                assert family is not None, f"{name}: the command has found it"
                return run(cell, family, self.references)
        except Exception as error:
            return Outcome("crash", _first_line(error), trace=traceback.format_exc())
        finally:
            torch.compiler.reset()
            forget_meshes()  # a mesh that stays keeps its groups, and their threads
            gc.collect()
