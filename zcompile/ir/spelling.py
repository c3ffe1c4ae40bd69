"""How arbitrary names of a model are spelled in a printed program, which is executable Python."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from zcompile.ir.ops import NAMES

_RESERVED = NAMES | {"forward", "backward", "operator", "math", "float"}
_REGION = re.compile(r"region(_\d+)?")
"""Names of regions; FX would rename the second of two values called `region` to `region_1`."""
_ESCAPE = re.compile(r"\\u\{([0-9a-f]+)\}")


def identifier(name: str) -> str:
    """Return `name` as a Python identifier that is valid for a value: `blocks.0` becomes `blocks_0`.

    It is lowercase ASCII without two leading underscores: FX renames other values when it copies a graph.
    """
    text = "".join(char if char.isascii() and char.isalnum() else "_" for char in name).lower()
    return free(f"u{text}" if not text.strip("_") or text[0].isdigit() or text.startswith("__") else text)


def common_module(paths: Iterable[str]) -> str:
    """Return the common parent module of `paths`, with a dot, which names of values leave out; "" if there is none.

    Paths without a dot, such as a head, need not be in it. The rest of each path begins with a word, not with a block's
    number, and is unique.
    """
    known = list(paths)
    parts = [path.split(".") for path in known if "." in path]
    common = list(itertools.takewhile(lambda together: len(set(together)) == 1, zip(*parts, strict=False)))
    while common and not all(len(path) > len(common) and path[len(common)].isidentifier() for path in parts):
        common.pop()
    around = "".join(f"{together[0]}." for together in common)
    left = [path.removeprefix(around) for path in known]
    is_clear = all(path[0].isidentifier() and not around.startswith(f"{path}.") for path in left)
    return around if is_clear and len({*left}) == len(left) else ""


def free(name: str) -> str:
    """Return `name`, with an underscore appended if it is reserved in a printed program."""
    return f"{name}_" if name in _RESERVED or _REGION.fullmatch(name) else name


def escaped(name: str) -> str:
    r"""Return `name` as one word of a comment: characters that would end or alter it are escaped, as `\u{20}`."""
    return "".join(char if _is_plain(char) else f"\\u{{{ord(char):x}}}" for char in name)


def quoted(name: str) -> str:
    """Return `name` as an ASCII Python string literal. JSON would write characters beyond 16 bits as two."""
    text = name.encode("unicode_escape").decode().replace('"', '\\"')
    return f'"{text}"'


def counted(count: int, noun: str) -> str:
    """`1 parameter`, `2 parameters`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def unescaped(text: str) -> str:
    """Invert `escaped`."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def _is_plain(char: str) -> bool:
    return char.isalnum() or char in "_.+-"
