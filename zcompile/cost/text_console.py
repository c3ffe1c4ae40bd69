"""A console of rich whose output is a text."""

from __future__ import annotations

import io

from rich.console import Console


class TextConsole(Console):
    """Collects plain text of `width` columns, also in a notebook, where rich shows all output, and with FORCE_COLOR."""

    def __init__(self, width: int) -> None:
        self._out = io.StringIO()
        super().__init__(file=self._out, width=width, force_jupyter=False, color_system=None)

    @property
    def text(self) -> str:
        """What was printed so far."""
        return self._out.getvalue()
