"""The engine of one model: what compiles its programs, what runs them, and what shows them."""

from __future__ import annotations

from zcompile.engine.compiler import Compiler
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.reports import Reports


class Engine:
    """The three of them, and a title for reports. Making one is collective.

    Raises:
        OptionError: on every rank: the folder of the dump cannot be written.
    """

    def __init__(self, runtime: ModelRuntime, *, title: str = "a model") -> None:
        self.runtime = runtime
        runtime.progress.what = title
        self.compiler = Compiler(runtime, lambda: self.reports.dump_if_asked())
        self.reports = Reports(title, runtime, self.compiler)
