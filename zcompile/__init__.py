"""zcompile: a compiler for distributed training. `zcompile.compile(model)` shards a plain model by ZeRO."""

from importlib.metadata import version

import torch

from zcompile.torch_range import check_torch

check_torch(torch.__version__)

from zcompile.compiled import CompiledModule, compile
from zcompile.cost.dag import dag
from zcompile.cost.forecast import Forecast, Plan
from zcompile.cost.hardware import Hardware, load_profile
from zcompile.cost.mesh_plan import MeshForecast, MeshPlan
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
from zcompile.proof.rules import Rule
from zcompile.proof.values import computes
from zcompile.schedule.default_pipeline import pipeline
from zcompile.schedule.pipeline import Pass, Pipeline
from zcompile.tools.mesh_planner import plan_meshes
from zcompile.tools.planner import plan
from zcompile.torch_backend import Backend, backend
from zcompile.train_step import TrainStep, train_step

__version__ = version("zcompile")

__all__ = [
    "AgreementError",
    "Backend",
    "BackwardError",
    "CaptureError",
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
    "tensor_parallel_plan",
    "train_step",
    "verify",
]
