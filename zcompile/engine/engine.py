"""The engine of one model: what compiles its programs, what runs them, and what shows them."""

from __future__ import annotations

from zcompile.engine.compiler import Compiler
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.reports import Reports
from zcompile.ir.layout import Layout
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.runtime.placement import ModelParallel
from zcompile.schedule.options import Options


class Engine:
    """The three of them. Making one is collective; the arguments are those of `ModelRuntime`, and a title for reports.

    Raises:
        OptionError: on every rank: the folder of the dump cannot be written.
    """

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        agreement: Agreement,
        options: Options,
        parallel: ModelParallel | None = None,
        everyone: Agreement | None = None,
        *,
        title: str = "a model",
    ) -> None:
        self.runtime = ModelRuntime(layout, communicator, agreement, options, parallel, everyone)
        self.compiler = Compiler(self.runtime, lambda: self.reports.dump_if_asked())
        self.reports = Reports(title, self.runtime, self.compiler)
