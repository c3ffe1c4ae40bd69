"""zcompile: a compiler for distributed training. `zcompile.compile(model)` shards a plain model by ZeRO."""

from importlib.metadata import version

from zcompile.compiled import CompiledModule, compile
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
    StateError,
    SubjectError,
    TimelineError,
    ZcompileError,
)
from zcompile.facts import Fact, Violation, verify
from zcompile.forecast import Forecast, Plan
from zcompile.hardware import Hardware, load_profile
from zcompile.parser import parse
from zcompile.pipeline import Pass, Pipeline
from zcompile.pipelines import pipeline
from zcompile.planner import plan
from zcompile.program import Program
from zcompile.region import Region
from zcompile.timeline import Timeline
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
    "ModelError",
    "OptimizerError",
    "OptionError",
    "ParameterError",
    "ParseError",
    "Pass",
    "Pipeline",
    "PipelineError",
    "Plan",
    "ProfileError",
    "Program",
    "ProgramError",
    "Region",
    "StateError",
    "SubjectError",
    "Timeline",
    "TimelineError",
    "TrainStep",
    "Violation",
    "ZcompileError",
    "backend",
    "compile",
    "load_profile",
    "parse",
    "pipeline",
    "plan",
    "train_step",
    "verify",
]
