"""Mutations of what keeps streams in order: each takes out a wait, an event, a hold or a `record_stream`.

    python -m tests.simulated.mutations [--only TEXT]

runs the scenarios that touch the line on a copy of the sources, and says which finding it makes. One that makes none
has to say why nothing depends on it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORLD = 4


@dataclass(frozen=True)
class Mutation:
    """`line` of `file`, which stands there once, becomes `instead`.

    Args:
        survives: Why nothing is found, where nothing is to be found.
    """

    file: str
    line: str
    instead: str
    scenarios: tuple[str, ...]
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.line.split())} -> {' '.join(self.instead.split())}"


PARAMETERS = ("stage 3, parameters", "train step, stage 3, parameters")
ACTIVATIONS = ("stage 3, activations", "stage 3, activations, checkpoint", "stage 3, side stream, arenas")
PIECES = ("stage 3, bf16, pieces", "stage 3, large, pieces")
AWAY, PUT, STATE = (f"runtime/offload/{name}.py" for name in ("host_shards", "activation_storage", "optimizer_states"))
EXECUTOR, GPUS, WORK = (f"runtime/{name}.py" for name in ("executor", "backend_collectives", "async_work"))
DELIVERY, UPDATES = (f"runtime/gradients/{name}.py" for name in ("delivery", "updates"))
ARENA, PARTS = "runtime/arena.py", "runtime/offload/activation_storage.py"
LINKS = "runtime/stage_links.py"
WHOLE, ONE_GRAPH = "zcompile/engine/step_graphs.py", "train step, stage 3, one graph"
UNLESS_IT_FAILS = "except NotImplementedError:\n            raise\n        else:"
"""In place of `finally:`."""

MUTATIONS = (
    # gathers and reductions
    Mutation(EXECUTOR, "arrived.record_stream(current_stream(arrived.device))", "pass",
             ("train step, stage 3, alternating", "train step, stage 1, alternating")),
    Mutation(EXECUTOR, "and stream_number(ranks.device) != self.stream:",
             "and stream_number(ranks.device) == self.stream:", ("train step, stage 3, alternating",)),
    Mutation(EXECUTOR, "    work.wait()\n            if is_alone", "    pass\n            if is_alone",
             ("stage 3, parameters", "one rank, parameters")),
    Mutation("runtime/recorder.py", "work.wait()\n        waited", "pass\n        waited", ("stage 3",)),
    Mutation(EXECUTOR, "kept, copies=True)", "kept, copies=False)", ("train step, stage 3, writing",)),
    Mutation(EXECUTOR, '_land(work, "all_gather", self.bound.unit.name, self.ranks, arrived.nbytes, self.ranks.axis)',
             "pass", ("hpz, int8 gathers",)),
    Mutation(WORK, "self._land()\n        if self._finish", "pass\n        if self._finish", ("stage 3",)),
    Mutation(GPUS, "            land()\n", "", ("stage 3",)),
    Mutation(WORK, "tuple(alive), finish, waits\n", "(), finish, waits\n", ("stage 3",),
             "torch holds the tensors of a collective itself until it is waited for"),
    Mutation(WORK, "self._finish()\n", "pass\n", ("stage 3",),
             "it divides sums where the backend has no average, which NCCL has"),
    Mutation("runtime/shards.py", "gather.wait()", "pass", ("train step, stage 3, writing",),
             "torch holds the tensors of a collective that nobody has waited for"),
    # pieces of a reduction
    Mutation(GPUS, "staging.wait_stream(current_stream(self.member.device))", "pass", PIECES),
    Mutation(GPUS, "== 2:\n                    in_flight.popleft()[0].wait()",
             "== 2:\n                    in_flight.popleft()", PIECES,
             "torch holds what a collective reads until it has ended: it would cost memory, and no order"),
    Mutation(GPUS, "            while in_flight:\n                in_flight.popleft()[0].wait()",
             "            while in_flight:\n                in_flight.popleft()", PIECES),
    Mutation(GPUS, "while in_flight:", "while len(in_flight) > 1:", PIECES),
    Mutation(GPUS, "done = staging.record_event()", "done = current_stream(self.member.device).record_event()", PIECES,
             "within it the current stream is the staging one"),
    Mutation(GPUS, "lambda: current_stream(self.member.device).wait_event(done)", "lambda: None", PIECES),
    Mutation(GPUS, "self._on_staging(launch, (shard, piece))", "self._on_staging(launch, ())", PIECES),
    # delivery
    Mutation(DELIVERY, "current_stream(event.device).wait_event(event)", "pass",
             ("stage 3, side stream", "stage 1, side stream"),
             "autograd joins the caller's stream with those of its leaves, and placeholder parameters are leaves"),
    Mutation(DELIVERY, "tensor.record_stream(current_stream(tensor.device))", "pass",
             ("stage 3, side stream", "stage 1, side stream")),
    Mutation(DELIVERY, "memory.landed()", "pass", ("stage 3, parameters, graph breaks",)),
    # shards in the memory of the host
    Mutation(AWAY, "self._sending.wait_stream(current_stream(self._model))", "pass", PARAMETERS),
    Mutation(AWAY, "self._sent = self._sending.record_event()", "pass", ("stage 3, parameters, evaluating",)),
    Mutation(AWAY, "lambda: current_stream(self._model).wait_event(done)", "lambda: None", ("one rank, parameters",)),
    Mutation(AWAY, "self._returning.wait_stream(current_stream(self._model))", "pass", PARAMETERS),
    Mutation(AWAY, "self._returning.wait_event(self._sent)", "pass", ("stage 3, parameters, reduction fails",)),
    Mutation(AWAY, "gradient.record_stream(self._returning)", "pass", PARAMETERS),
    Mutation(AWAY, "self._returned.synchronize()", "pass", PARAMETERS),
    Mutation(AWAY, "self._sent.synchronize()", "pass", ("stage 3, parameters, evaluating",)),
    Mutation(AWAY, "with on_stream(self._returning):", "if True:", PARAMETERS),
    Mutation(EXECUTOR, "bound.shards.memory.landed()", "pass", ("train step, stage 3, parameters",)),
    Mutation("zcompile/engine/model_runtime.py", "memory.settle()", "pass",
             ("stage 3, parameters, evaluating",)),
    Mutation("zcompile/engine/lowering.py", "memory.settle()", "pass",
             ("stage 3, parameters, backward fails", "stage 3, parameters, reduction fails")),
    Mutation("zcompile/engine/lowering.py", "self.runtime.communicator.order_all()", "pass",
             ("stage 3, arenas, backward fails", "train step, stage 3, graphs, update fails")),
    Mutation(AWAY, "finally:  # what was", f"{UNLESS_IT_FAILS}  # what was", ("stage 3, parameters, gather fails",)),
    # activations
    Mutation(PUT, "self.stream.wait_event(self.ended)", "pass", ACTIVATIONS),
    Mutation(PUT, "current_stream(self._stream.device).wait_event(coming.ended)", "pass", ACTIVATIONS),
    Mutation(PUT, "self._stream.wait_stream(current)", "pass", ACTIVATIONS),
    Mutation(PUT, ">= PENDING:\n            self._leaving.popleft().land()",
             ">= PENDING:\n            self._leaving.popleft()", ACTIVATIONS),
    Mutation(PUT, "self._copied(host, flat, flat)", "self._copied(host, flat, host)", ACTIVATIONS),
    Mutation(PUT, "self._coming[id(back)] = self._copied", "self._copied", ("stage 3, activations, backward fails",)),
    Mutation(PUT, "self._coming.popitem()[1].land()", "self._coming.popitem()",
             ("stage 3, activations, backward fails",)),
    Mutation(PARTS, "work.wait()", "pass", ("tensor parallel, parts",)),
    # the optimizer's state in the memory of the host
    Mutation(STATE, "current_stream(self.device).wait_event(arrived)", "pass",
             ("train step, stage 3, optimizer",)),
    Mutation(STATE, "self._stream.wait_stream(current_stream(self.device))", "pass",
             ("train step, stage 3, optimizer",)),
    Mutation(STATE, "come.record_stream(current_stream(self.device))", "pass",
             ("train step, stage 3, optimizer",),
             "what has come leaves by the same stream, for which its memory was allocated"),
    Mutation(STATE, "local.record_stream(self._stream)", "pass", ("train step, stage 3, optimizer",)),
    Mutation(STATE, "self._left.synchronize()", "pass", ("train step, stage 3, optimizer, loading",)),
    Mutation(STATE, "self._left = self._arrived[unit]", "self._arrived[unit]",
             ("train step, stage 3, optimizer, update fails",)),
    Mutation(UPDATES, "finally:\n            if self.states", f"{UNLESS_IT_FAILS}\n            if self.states",
             ("train step, stage 3, optimizer, update fails",)),
    # messages between pipeline stages
    Mutation(LINKS, "StreamWork(work.wait, (tensor,), waits=self.waits)",
             "StreamWork(lambda: None, (tensor,), waits=self.waits)", ("pipeline, stage 3",)),
    Mutation(LINKS, "StreamWork(work.wait, (tensor,), waits=self.waits)",
             "StreamWork(work.wait, (), waits=self.waits)", ("pipeline, stage 3",),
             "torch holds the tensors of a message itself until it is waited for"),
    # a step as one graph
    Mutation(WHOLE, "self._stream.wait_stream(here)", "pass", (f"{ONE_GRAPH}, writing", f"{ONE_GRAPH}, alternating")),
    Mutation(WHOLE, "here.wait_stream(self._stream)", "pass", (f"{ONE_GRAPH}, writing", f"{ONE_GRAPH}, alternating")),
    # arenas
    Mutation(ARENA, "if block.is_free and block.stream == stream)", "if block.is_free)",
             ("stage 3, arenas, apart",)),
    Mutation(ARENA, "return self.lent is None or bool(self.lent.expired())", "return True",
             ("stage 3, arenas, checkpoint", "stage 3, arenas, accumulating")),
)  # fmt: skip


def findings_of(mutation: Mutation) -> list[str]:
    """What the checker finds.

    Raises:
        RuntimeError: the mutated program does not run.
    """
    source = (ROOT / mutation.file).read_text()
    assert source.count(mutation.line) == 1, f"{mutation} stands there {source.count(mutation.line)} times"
    with tempfile.TemporaryDirectory() as folder:
        for name, place in (("zcompile", ""), ("passes", "passes"), ("runtime", "runtime")):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(folder) / "zcompile" / place, dirs_exist_ok=True, ignore=ignored)
        inside = mutation.file if mutation.file.startswith("zcompile/") else f"zcompile/{mutation.file}"
        (Path(folder) / inside).write_text(source.replace(mutation.line, mutation.instead))
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__.replace("__main__", __spec__.name), "--run", *mutation.scenarios]
        there = range(2 if mutation.scenarios[0].startswith("pipeline") else 1)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, cwd=folder, **pipes) for rank in there
        ]
        ended = [(*one.communicate(timeout=200), one.returncode) for one in started]
    for _, errors, code in ended:
        if code:
            raise RuntimeError(f"{mutation} cannot run:\n{errors[-2000:]}")
    lines = [line for printed, *_ in ended for line in printed.strip().splitlines()]
    return [finding for line in lines if line.startswith("[") for finding in json.loads(line)]


def run(names: list[str], rank: int) -> None:
    """Run scenarios in this process, and print their findings; ranks of pipelines are all there."""
    device = importlib.import_module("tests.simulated.device")  # it has to be there before torch
    import torch.distributed as dist

    import zcompile
    from tests.simulated import nccl, scenarios

    device.ROOTS.append(f"{Path(zcompile.__file__).parent}/")
    for name in names:
        if scenarios.SCENARIOS[name].by == "pipeline":
            store = re.sub("[^a-z0-9]+", "_", name)  # in the folder of the copy, where both ranks are
            nccl.join(f"{os.getcwd()}/{store}", rank, scenarios.SCENARIOS[name].world, timedelta(seconds=60))
        else:
            nccl.pretend(scenarios.SCENARIOS[name].world or WORLD)
        print(json.dumps(scenarios.run(rank, name).findings), flush=True)
        dist.destroy_process_group()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", metavar="TEXT", help="mutations with this in their text")
    options.add_argument("--run", nargs="+", metavar="SCENARIO", help=argparse.SUPPRESS)
    options.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.run:
        run(given.run, given.rank)
        # A thread of autograd's that frees a tensor while the interpreter ends would abort the process.
        os._exit(0)
    missed = 0
    chosen = [mutation for mutation in MUTATIONS if given.only in str(mutation)]
    for mutation in chosen:
        found = findings_of(mutation)
        missed += not found and not mutation.survives
        verdict = found[0] if found else f"survives: {mutation.survives}" if mutation.survives else "MISSED"
        print(f"{mutation}\n    {verdict[:300]}", flush=True)
    print(f"{len(chosen)} mutations, {missed} missed")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
