"""The errors zcompile raises: each names a thing, what is wrong with it, and the fix."""

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
        subject: What it is about: an option, a parameter, a module path, a line of a program.
        problem: What is wrong there.
        fix: What the reader can do.
    """

    def __init__(self, subject: str, problem: str, fix: str) -> None:
        self.subject, self.problem, self.fix = subject, problem, fix
        super().__init__(f"{subject}: {_sentence(problem)}\n  Fix: {_sentence(fix)}")

    def __reduce__(self) -> tuple[type[ZcompileError], tuple[str, str, str]]:
        """Pickled by what it was made from, so that it can come from another rank."""
        return type(self), (self.subject, self.problem, self.fix)


def _sentence(text: str) -> str:
    """`text` with a full stop, but for one that has its own, or ends in lines that are shown."""
    return text if text.endswith((".", "!", "?")) or "\n" in text else f"{text}."


class VersionError(ZcompileError, ImportError):
    """The torch that is installed is none of those that zcompile runs on."""


class OptionError(ZcompileError, ValueError):
    """An option of `zcompile.compile` or `zcompile.pipeline` that cannot be meant."""


class ModelError(ZcompileError, ValueError):
    """A model that cannot be sharded: no parameters, several devices, shared storage."""


class GroupError(ZcompileError):
    """The process group or the mesh is missing or does not fit."""


class AgreementError(ZcompileError):
    """The ranks hold different models or would run different communications."""


class CaptureError(ZcompileError):
    """The model could not be traced into one graph, or its graph cannot be sharded."""


class ParameterError(ZcompileError):
    """A parameter was replaced, moved or used outside a program."""


class OptimizerError(ZcompileError):
    """An optimizer holds parameters from before `zcompile.compile`."""


class StateError(ZcompileError):
    """A state dict or a checkpoint that is not this model's or optimizer's, is damaged, or cannot be written."""


class BackwardError(ZcompileError):
    """A backward that would compute a wrong gradient: a freed graph, or parameters changed since the forward."""


class TimelineError(ZcompileError):
    """A timeline was read before a step had ended."""


class ProfileError(ZcompileError, ValueError):
    """A hardware profile that cannot be read, or whose figures cannot be meant."""


class SubjectError(ZcompileError, ValueError):
    """What a command is given names no model, or one that cannot be made."""


class PipelineError(ZcompileError):
    """A pass is missing, misnamed, or stands where its requirements cannot hold."""


class ProgramError(ZcompileError):
    """A program failed a fact; the message points at the line."""


class ProofError(ZcompileError):
    """A text does not compute, or send, what it should."""


class ParseError(ZcompileError, ValueError):
    """A text is not a printed program."""


class ReplayError(ZcompileError):
    """A recording that is missing, damaged, incomplete or of other versions, or has no such line."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The advice for a misspelt name: the nearest choice first, then all of them (the first dozen of many)."""
    known = sorted(map(str, choices))  # of an enumeration, the texts that are given
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    more = f" and {len(known) - 12} more" if len(known) > 12 else ""
    return (f"did you mean {close[0]!r}? " if close else "") + f"choose from {', '.join(map(repr, known[:12]))}{more}"


_BETWEEN = ("zcompile", "torch", "contextlib", "functools")
"""Packages whose lines say nothing of what a user has done."""
_OF_PASSES = (ParseError, PipelineError, ProgramError, ProofError)
"""Errors of passes, for whose authors each line of ours says something."""


def shortened(error: ZcompileError) -> ZcompileError:
    """`error`, to be raised again where it is caught, without the lines of ours and of torch in its traceback."""
    if isinstance(error, _OF_PASSES) or error.__traceback__ is None:
        return error
    return error.with_traceback(_without(error.__traceback__.tb_next))


def briefly(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, whose errors have short tracebacks: see `shortened`."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except ZcompileError as error:
            raise shortened(error)  # noqa: B904  # the same one, with the causes that it has

    return call


def _without(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    rest, frame = _without(traceback.tb_next), traceback.tb_frame
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    generated = frame.f_code.co_filename.startswith("<") and not frame.f_code.co_filename.startswith("<zcompile ")
    if package in _BETWEEN or generated:
        return rest
    return TracebackType(rest, frame, traceback.tb_lasti, traceback.tb_lineno)
