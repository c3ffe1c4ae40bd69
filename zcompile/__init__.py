"""zcompile: a compiler for distributed training. `zcompile.compile(model)` shards a plain model by ZeRO.

Public names are imported on first use: importing torch takes seconds, and `zcompile --help` does not need it.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from zcompile.torch_range import check_torch, torch_version

check_torch(torch_version())

if TYPE_CHECKING:
    from zcompile.compile_model import compile
    from zcompile.compiled import CompiledModule
    from zcompile.cost.dag import dag
    from zcompile.cost.forecast import Forecast, MeshForecast, MeshPlan, Plan
    from zcompile.cost.hardware import Hardware, load_profile
    from zcompile.cost.timeline import Timeline
    from zcompile.errors import (
        AgreementError,
        BackwardError,
        CaptureError,
        GroupError,
        ModelError,
        OptimizerError,
        OptionError,
        ParameterError,
        ParseError,
        PipelineError,
        ProfileError,
        ProgramError,
        ProofError,
        ReplayError,
        ResultError,
        StateError,
        SubjectError,
        TimelineError,
        VersionError,
        ZcompileError,
    )
    from zcompile.facts import Fact, Violation, verify
    from zcompile.ir.parser import parse
    from zcompile.ir.program import Program
    from zcompile.ir.region import Region
    from zcompile.model.tensor_parallel import tensor_parallel_plan
    from zcompile.pipelining.step import PipelinedStep
    from zcompile.proof.terms import Rule
    from zcompile.proof.values import computes
    from zcompile.runtime.sequences import sequence_gather, sequence_slice
    from zcompile.schedule.default_pipeline import pipeline
    from zcompile.schedule.options import BackendOptions, CompileOptions
    from zcompile.schedule.pipeline import Pass, Pipeline
    from zcompile.tools.mesh_planner import plan_meshes
    from zcompile.tools.planner import plan
    from zcompile.torch_backend import Backend, backend
    from zcompile.training_step import TrainStep, train_step

__version__ = version("zcompile")

__all__ = [
    "AgreementError",
    "Backend",
    "BackendOptions",
    "BackwardError",
    "CaptureError",
    "CompileOptions",
    "CompiledModule",
    "Fact",
    "Forecast",
    "GroupError",
    "Hardware",
    "MeshForecast",
    "MeshPlan",
    "ModelError",
    "OptimizerError",
    "OptionError",
    "ParameterError",
    "ParseError",
    "Pass",
    "Pipeline",
    "PipelineError",
    "PipelinedStep",
    "Plan",
    "ProfileError",
    "Program",
    "ProgramError",
    "ProofError",
    "Region",
    "ReplayError",
    "ResultError",
    "Rule",
    "StateError",
    "SubjectError",
    "Timeline",
    "TimelineError",
    "TrainStep",
    "VersionError",
    "Violation",
    "ZcompileError",
    "backend",
    "compile",
    "computes",
    "dag",
    "load_profile",
    "parse",
    "pipeline",
    "plan",
    "plan_meshes",
    "sequence_gather",
    "sequence_slice",
    "tensor_parallel_plan",
    "train_step",
    "verify",
]

_HOMES = {
    "zcompile.compile_model": "compile",
    "zcompile.compiled": "CompiledModule",
    "zcompile.cost.dag": "dag",
    "zcompile.cost.forecast": "Forecast MeshForecast MeshPlan Plan",
    "zcompile.cost.hardware": "Hardware load_profile",
    "zcompile.cost.timeline": "Timeline",
    "zcompile.errors": "AgreementError BackwardError CaptureError GroupError ModelError OptimizerError OptionError "
    "ParameterError ParseError PipelineError ProfileError ProgramError ProofError ReplayError "
    "ResultError StateError SubjectError TimelineError VersionError ZcompileError",
    "zcompile.facts": "Fact Violation verify",
    "zcompile.ir.parser": "parse",
    "zcompile.ir.program": "Program",
    "zcompile.ir.region": "Region",
    "zcompile.model.tensor_parallel": "tensor_parallel_plan",
    "zcompile.pipelining.step": "PipelinedStep",
    "zcompile.proof.terms": "Rule",
    "zcompile.proof.values": "computes",
    "zcompile.runtime.sequences": "sequence_gather sequence_slice",
    "zcompile.schedule.default_pipeline": "pipeline",
    "zcompile.schedule.options": "BackendOptions CompileOptions",
    "zcompile.schedule.pipeline": "Pass Pipeline",
    "zcompile.tools.mesh_planner": "plan_meshes",
    "zcompile.tools.planner": "plan",
    "zcompile.torch_backend": "Backend backend",
    "zcompile.training_step": "TrainStep train_step",
}
"""The module that defines each public name: the same as the imports above, which only type checkers read."""
_FOLDERS = frozenset(["cost", "facts", "ir", "passes", "proof", "runtime", "schedule"])
"""Subpackages that are also importable as attributes, as in `zcompile.ir.ops`."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f"zcompile.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
