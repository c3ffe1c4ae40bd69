"""Colours of printed programs: the parts of a line, each in a tag that the style sheet colours.

    layers_0_full = wait(layers_0_gather)    #    -54.01 MiB    layers.0
                    ^^^^                     ^^^^^^^^^^^^^^^^^^^^^^^^^^^
                    operation                margin, with types and bytes in it

Text is escaped here, and tags go around it: without them a line reads as it is printed, blank for blank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from markupsafe import Markup, escape

_PARTS = re.compile(
    r"""
    (?P<margin>[ ]*\#.*)
    | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<keyword>\b(?:def|return|del|None|True|False)\b)
    | (?P<region>\bregion_\d+(?=\())
    | (?P<function>\b[a-z_]\w*(?:\.\w+)+(?=\())
    | (?P<operation>\b[a-z_]\w*(?=\())
    """,
    re.VERBOSE,
)
_IN_MARGIN = re.compile(
    r"""
    (?P<type>[=&]*\b(?:[a-z]+\d+|f8\w+)\[[^\]]*\]|\b\d+[ ]values\b)
    | (?P<gained>(?<=[ ])\+[\d.]+[ ][KMGT]?i?B\b)
    | (?P<freed>(?<=[ ])-[\d.]+[ ][KMGT]?i?B\b)
    """,
    re.VERBOSE,
)


def coloured(line: str) -> Markup:
    """A line of a printed program as HTML, its parts in tags."""
    return Markup("").join(_tagged(line, _PARTS))


def _tagged(text: str, parts: re.Pattern[str]) -> Iterator[Markup]:
    end = 0
    for found in parts.finditer(text):
        kind = found.lastgroup or ""
        inner = Markup("").join(_tagged(found[0], _IN_MARGIN)) if kind == "margin" else escape(found[0])
        yield escape(text[end : found.start()])
        yield Markup('<i class="{}">{}</i>').format(kind, inner)
        end = found.end()
    yield escape(text[end:])
