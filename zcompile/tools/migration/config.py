"""A config that is read key by key: what nobody asked for is told at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from zcompile.errors import OptionError

AUTO = "auto"
"""What Hugging Face's Trainer replaces by what its TrainingArguments say."""


class Config:
    """Nested keys and values, each taken at most once. A path is the keys joined by dots."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._taken: set[str] = set()

    def take(self, path: str, default: Any = None) -> Any:
        """The value at a path, or the default where it is absent, null or "auto"."""
        self._taken.add(path)
        value = self._at(path)
        return default if value is None or value == AUTO else value

    def is_auto(self, path: str) -> bool:
        """True if the value at a path is left to the Trainer."""
        return bool(self._at(path) == AUTO)

    def _at(self, path: str) -> Any:
        value: Any = self._values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def flag(self, path: str, *, default: bool = False) -> bool:
        """A value that is true or false; text such as "true" is both YAML's and people's."""
        value = self.take(path, default)
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        if not isinstance(value, bool):
            raise OptionError(path, f"is {value!r}", "make it true or false")
        return value

    def number(self, path: str, default: float = 0) -> float:
        """A value that is a number; text such as "5e8", which YAML takes for one, is as good."""
        value = self.take(path, default)
        try:
            found = float(value)
        except (TypeError, ValueError) as error:
            raise OptionError(path, f"is {value!r}", "make it a number") from error
        return int(found) if found.is_integer() else found

    @property
    def taken(self) -> Set[str]:
        """The paths that somebody asked for, whether they are there or not."""
        return self._taken

    def rest(self, known: Set[str]) -> Iterator[tuple[str, Any]]:
        """Paths that nobody took, with their values. A section is looked into if a path in it is taken or `known`."""
        sections = {path[:at] for path in {*self._taken, *known} for at, sign in enumerate(path) if sign == "."}
        yield from self._rest(self._values, "", sections)

    def _rest(self, values: Mapping[str, Any], prefix: str, sections: Set[str]) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            path = f"{prefix}{key}"
            if path in self._taken:
                continue
            if isinstance(value, Mapping) and path in sections:
                yield from self._rest(value, f"{path}.", sections)
            else:
                yield path, value


def is_off(value: Any) -> bool:
    """True for what asks for nothing: false, null, "none", or a section that is not enabled."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value in (None, False, "none", "None", "no", "NO", AUTO, [], "")
