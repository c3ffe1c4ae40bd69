"""How names of a model are spelled in a printed program, which is Python and runs: whatever is in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from zcompile.ir.ops import NAMES

_RESERVED = NAMES | {"forward", "backward", "operator", "math", "float"}
_REGION = re.compile(r"region(_\d+)?")
"""What regions are called; of two values called `region`, FX would call one `region_1`."""
_ESCAPE = re.compile(r"\\u\{([0-9a-f]+)\}")


def identifier(name: str) -> str:
    """`name` as a Python identifier that is free for a value: `blocks.0` becomes `blocks_0`.

    ASCII in lower case, without two underscores in front: FX respells the rest when it copies.
    """
    text = "".join(char if char.isascii() and char.isalnum() else "_" for char in name).lower()
    return free(f"u{text}" if not text.strip("_") or text[0].isdigit() or text.startswith("__") else text)


def common_module(paths: Iterable[str]) -> str:
    """The module, with a dot, in which `paths` are, so that values need not be called by it; empty for none.

    A model's own children, such as a head, may stand beside it. What is left of each path begins with a word, not with
    the number of a block, and is no other's name.
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
    """`name`, or another one where it has a meaning in a printed program."""
    return f"{name}_" if name in _RESERVED or _REGION.fullmatch(name) else name


def escaped(name: str) -> str:
    r"""`name` as a word of a comment: what would end it, or be read as something else, as `\u{20}`."""
    return "".join(char if _is_plain(char) else f"\\u{{{ord(char):x}}}" for char in name)


def quoted(name: str) -> str:
    """`name` as a string of Python, in ASCII. JSON would write characters beyond 16 bits as two."""
    text = name.encode("unicode_escape").decode().replace('"', '\\"')
    return f'"{text}"'


def counted(count: int, noun: str) -> str:
    """`1 parameter`, `2 parameters`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def unescaped(text: str) -> str:
    """What `escaped` was given."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def _is_plain(char: str) -> bool:
    return char.isalnum() or char in "_.+-"
