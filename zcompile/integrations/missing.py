"""What is said where a library is not installed."""

from __future__ import annotations


def missing(library: str, extra: str) -> ImportError:
    """For a module of this package whose library cannot be imported."""
    return ImportError(f"zcompile.integrations.{extra} needs {library}. Fix: pip install 'zcompile[{extra}]'")
