"""Rendering: templates of pages, which are one file of HTML each and fetch nothing.

What is put into them is escaped: names of modules are text, whatever is in them.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

from zcompile.ir.tensor_type import human_bytes
from zcompile.report.axes import decimal_bytes, human_count, human_seconds
from zcompile.report.highlight import coloured


def rendered(template: str, **values: Any) -> str:
    """The page that `template` makes of `values`."""
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


def write(path: Path, text: str) -> Path:
    """Write a page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(text, encoding="utf-8")
    return path
