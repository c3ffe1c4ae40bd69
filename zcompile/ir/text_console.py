"""A console of rich whose output is a text."""

from __future__ import annotations

import io

from rich.console import Console


class TextConsole(Console):
    """Collects what is printed as plain text of `width` columns.

    In a notebook a Console shows its output at once, whatever its file is, and with FORCE_COLOR it writes escape
    sequences.
    """

    def __init__(self, width: int) -> None:
        self._out = io.StringIO()
        super().__init__(file=self._out, width=width, force_jupyter=False, color_system=None)

    @property
    def text(self) -> str:
        """What was printed so far."""
        return self._out.getvalue()
