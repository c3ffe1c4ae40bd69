"""Checks of options, with the nearest valid choice in the message."""

from __future__ import annotations

import torch

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


def check_dtype(option: str, dtype: object) -> None:
    """Raise OptionError for what is no real floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        fix = "choose torch.bfloat16, torch.float16 or torch.float32, or None for the model's own"
        raise OptionError(option, f"{dtype!r} is no dtype to compute with", fix)


def check_backend(backend: object) -> None:
    """Raise OptionError for an unknown backend."""
    if backend not in BACKENDS:
        raise OptionError("backend", f"{backend!r} is unknown", nearest(str(backend), BACKENDS))
