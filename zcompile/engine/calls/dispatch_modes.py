"""Dispatch modes of the user's, such as counters of operations, around a call of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcompile.torch_internals.dispatch import TorchDispatchMode, modes_aside, modes_back, modes_of_user


@dataclass
class Modes:
    """Those that are put aside while torch.compile looks at a call, and are back while its programs run."""

    _aside: Sequence[TorchDispatchMode] = ()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside, torch.compile does not see them."""
        modes = modes_of_user()
        return self._put(modes) if modes else contextlib.nullcontext()

    def back(self) -> contextlib.AbstractContextManager[None]:
        """Inside of `aside`, they see what is computed."""
        return modes_back(self._aside) if self._aside else contextlib.nullcontext()

    @contextlib.contextmanager
    def _put(self, modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
        before, self._aside = self._aside, modes
        try:
            with modes_aside(modes):
                yield
        finally:
            self._aside = before
