"""The errors that zcompile raises: each names a subject, the problem with it, and the fix."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ZcompileError(RuntimeError):
    """Base of every error that zcompile raises on purpose.

    Args:
        subject: An option, a parameter, a module path or a line of a program.
        problem: What is wrong with the subject.
        fix: What the user can do.
    """

    def __init__(self, subject: str, problem: str, fix: str) -> None:
        self.subject, self.problem, self.fix = subject, problem, fix
        super().__init__(f"{subject}: {_sentence(problem)}\n  Fix: {_sentence(fix)}")

    def __reduce__(self) -> tuple[type[ZcompileError], tuple[str, str, str]]:
        """Pickle the constructor's arguments, so that the error can be sent to another rank."""
        return type(self), (self.subject, self.problem, self.fix)


def _sentence(text: str) -> str:
    """`text` with a full stop, unless it has end punctuation or spans several lines."""
    return text if text.endswith((".", "!", "?")) or "\n" in text else f"{text}."


class VersionError(ZcompileError, ImportError):
    """The installed release of torch is not supported."""


class OptionError(ZcompileError, ValueError):
    """An option of `zcompile.compile` or another function is invalid."""


class ModelError(ZcompileError, ValueError):
    """A model cannot be sharded: it has no parameters, several devices, or shared storage."""


class GroupError(ZcompileError):
    """The process group or the mesh is missing or unsuitable."""


class AgreementError(ZcompileError):
    """The ranks have different models, or would run different communications."""


class CaptureError(ZcompileError):
    """The model could not be traced into one graph, or its graph cannot be sharded."""


class ParameterError(ZcompileError):
    """A parameter was replaced, moved or used outside a program."""


class OptimizerError(ZcompileError):
    """An optimizer does not fit the compiled model: it holds other parameters, or has an unsupported step."""


class StateError(ZcompileError):
    """A state dict or checkpoint does not match the model or optimizer, is damaged, or cannot be written."""


class ResultError(ZcompileError, AttributeError):
    """A result of a call is read that was not kept."""


class BackwardError(ZcompileError):
    """A backward would compute wrong gradients: its graph was freed, or parameters changed after the forward."""


class TimelineError(ZcompileError):
    """A timeline was read before any step had finished."""


class ProfileError(ZcompileError, ValueError):
    """A hardware profile cannot be read, or has invalid figures."""


class SubjectError(ZcompileError, ValueError):
    """The subject of a command is not a model, script or config, or the model cannot be made."""


class PipelineError(ZcompileError):
    """A pass is missing, misnamed, or at a position where its requirements cannot hold."""


class ProgramError(ZcompileError):
    """A program violates a fact; the message points at the line."""


class ProofError(ZcompileError):
    """The text of a program does not compute or send what it should."""


class ParseError(ZcompileError, ValueError):
    """A text is not a valid printed program."""


class ReplayError(ZcompileError):
    """A recording is missing, damaged, incomplete, made by other versions, or lacks the requested line."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Advice for a misspelt name: the nearest choice, then all choices, or the first twelve and a count."""
    known = sorted(map(str, choices))  # str() for members of enumerations
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    more = f" and {len(known) - 12} more" if len(known) > 12 else ""
    return (f"did you mean {close[0]!r}? " if close else "") + f"choose from {', '.join(map(repr, known[:12]))}{more}"


_HIDDEN_PACKAGES = ("zcompile", "torch", "contextlib", "functools")
"""Packages whose frames tell a user nothing about their own code."""
_PASS_ERRORS = (ParseError, PipelineError, ProgramError, ProofError)
"""Errors of passes: their authors need zcompile's own frames."""


def shortened(error: ZcompileError) -> ZcompileError:
    """`error` without the frames of zcompile and torch in its traceback; the caller raises it again."""
    if isinstance(error, _PASS_ERRORS) or error.__traceback__ is None:
        return error
    return error.with_traceback(_without(error.__traceback__.tb_next))


def briefly(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate `function` so that its errors have short tracebacks: see `shortened`."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except ZcompileError as error:
            raise shortened(error)  # noqa: B904  # the same object, so it keeps its cause

    return call


def _without(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    rest, frame = _without(traceback.tb_next), traceback.tb_frame
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    generated = frame.f_code.co_filename.startswith("<") and not frame.f_code.co_filename.startswith("<zcompile ")
    if package in _HIDDEN_PACKAGES or generated:
        return rest
    return TracebackType(rest, frame, traceback.tb_lasti, traceback.tb_lineno)
