"""Render pages from templates; each page is a single HTML file that fetches nothing.

All values are escaped, so that names of modules cannot contain markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jinja2
from markupsafe import Markup, escape

from zcompile.cost.hardware import Hardware
from zcompile.ir.tensor_type import human_bytes
from zcompile.report.axes import decimal_bytes, human_count, human_seconds


def rendered(template: str, **values: Any) -> str:
    """Render `template` with `values`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zcompile.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "human": human_bytes,
        "decimal": decimal_bytes,
        "count": human_count,
        "seconds": human_seconds,
        "coloured": coloured,
        "kind": lambda name: name.replace(" ", "-"),
    }
    return environment.get_template(template).render(version=version("zcompile"), **values)


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
    """A line of a printed program as escaped HTML, with tags for syntax colouring."""
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


_FLOPS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"))


def rates(hardware: Hardware) -> Iterator[str]:
    """The rates of hardware as text: matrix products by dtype, memory, and each link."""
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in hardware.flops.items():
        by_rate.setdefault(rate, []).append(dtype)
    for rate, dtypes in by_rate.items():
        yield f"{_flops(rate)} in {' and '.join(dtypes) if len(dtypes) < 3 else 'every dtype'}"
    yield f"memory {decimal_bytes(hardware.memory_bandwidth)}/s"
    for link in hardware.links:
        joined = f" ({link.members:.0f} ranks)" if link.members else ""
        fast = f"{decimal_bytes(link.bandwidth)}/s" if math.isfinite(link.bandwidth) else "without limit"
        yield f"{link.name}{joined} {fast}, {human_seconds(link.latency)} latency"


def _flops(rate: float) -> str:
    factor, unit = next((one for one in _FLOPS if rate >= one[0]), _FLOPS[-1])
    return f"{rate / factor:.3g} {unit}"
