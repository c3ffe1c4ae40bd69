"""Checks of options, with the nearest valid choice in the message."""

from __future__ import annotations

from zcompile.errors import OptionError, nearest

BACKENDS = ("inductor", "eager")


def check_stage(stage: object) -> None:
    """Raise OptionError for what is no ZeRO stage."""
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        raise OptionError("stage", f"{stage!r} is no ZeRO stage", "choose 0, 1, 2 or 3")


def check_prefetch(prefetch: object) -> None:
    """Raise OptionError for what is no number of units."""
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise OptionError(
            "prefetch", f"{prefetch!r} is no number of units", "choose 0 for none, or how many to gather ahead"
        )


def check_backend(backend: object) -> None:
    """Raise OptionError for an unknown backend."""
    if backend not in BACKENDS:
        raise OptionError("backend", f"{backend!r} is unknown", nearest(str(backend), BACKENDS))
