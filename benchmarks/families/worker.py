"""One rank of the matrix: trains cell after cell, each beside the same loop under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import zcompile
from benchmarks.families.catalogue import find
from benchmarks.families.cells import CELLS, WITHOUT, Outcome, Task
from benchmarks.families.family import Family
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
        shared = "plain_loop" if loop in ("compiled_loop", "traced_loop") else loop
        if self._key != (family.name, shared):
            if _draws(family):
                raise ValueError("its loss draws random numbers: switch off its dropout")
            start = Recorder().end(family.models())
            found = importlib.import_module(f"benchmarks.families.{shared}").train(family, None)
            if not all(torch.isfinite(loss).all() for loss in found.losses):
                raise ValueError("a loss is not finite")
            if all(
                torch.equal(one, other) for one, other in zip(start.state.values(), found.state.values(), strict=True)
            ):
                raise ValueError("nothing was trained")
            self._key, self._found = (family.name, shared), found
        return self._found


def _draws(family: Family) -> bool:
    """Whether a loss is random, so that no two runs could be compared."""
    models = family.models()
    before = torch.get_rng_state()
    family.phases[0].loss(models, family.batches(0)[0])
    return not torch.equal(before, torch.get_rng_state())


def run(task: Task, family: Family, references: References) -> Outcome:
    """Train a cell on this rank, and compare. Collective."""
    cell = CELLS[task.cell]
    try:
        wanted = references.of(family, cell.loop)
    except Exception as error:
        return Outcome("void", _first_line(error), trace=traceback.format_exc())
    torch.compiler.reset()
    try:
        found = importlib.import_module(f"benchmarks.families.{cell.loop}").train(family, cell.options)
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


def joined(task: Task, references: References) -> Outcome:
    """Run a task within a process group of its own."""
    store = dist.FileStore(str(task.store), 2)
    patience = timedelta(seconds=task.patience)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=2, timeout=patience)
    try:
        dist.barrier()
        family = find(task.family)
        assert family is not None, f"{task.family}: the command has found it"
        return run(task, family, references)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        torch.compiler.reset()
        forget_meshes()  # a mesh that stays keeps its groups, and their threads
        gc.collect()


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    references, connection = References(), Connection(int(sys.argv[1]))
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            try:
                connection.send(joined(connection.recv(), references))
            except EOFError:
                raise
            except Exception as error:
                connection.send(Outcome("crash", _first_line(error), trace=traceback.format_exc()))


if __name__ == "__main__":
    main()
