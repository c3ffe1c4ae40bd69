"""What can be saved and loaded: methods for state that is whole, and for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import Optimizer

from zcompile.errors import briefly
from zcompile.state.model_state import ModelState, Save


class Savable:
    """State of a model whose parameters are shards: whole, in one file, or in a checkpoint of all ranks."""

    def _stored(self) -> ModelState:
        """What reads and writes it.

        Raises:
            StateError: the model is not divided yet.
        """
        raise NotImplementedError

    @briefly
    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """The whole state in CPU memory, gathered one parameter at a time, for the plain model to load. Collective.

        Each name has memory of its own, also where parameters are tied. Buffers are the first rank's. On other ranks
        than the first of the mesh the result is empty, unless `rank0_only=False`.
        """
        return self._stored().full(rank0_only)

    @briefly
    def load_full_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a state that is whole, such as the plain model's. Collective.

        Args:
            state: On every rank, which then takes its rows; or on the mesh's first rank, which sends them one parameter
                at a time, and None or nothing in it elsewhere.

        Raises:
            StateError: on every rank, and before anything is written: a name, shape or dtype that does not fit.
        """
        self._stored().load_full(state)

    @briefly
    def save_full_state_dict(self, path: str | os.PathLike[str]) -> None:
        """Write `full_state_dict` to one file, whole or not at all. Collective; the mesh's first rank writes.

        Args:
            path: A file for `safetensors` if it ends in `.safetensors`, else for `torch.load`.

        Raises:
            StateError: on every rank: it cannot be written, or the package safetensors is missing.
        """
        self._stored().save_full(path)

    @briefly
    def full_optimizer_state_dict(self, optimizer: Optimizer, *, rank0_only: bool = True) -> dict[str, Any]:
        """The optimizer's whole state in CPU memory, for the plain model's optimizer to load. Collective.

        Gathered one tensor at a time. On other ranks than the first of the mesh the result is empty, unless
        `rank0_only=False`.

        Raises:
            StateError: on every rank: the ranks have different parameters, as pipeline stages do.
            OptimizerError: the optimizer holds other parameters than this model's.
        """
        return self._stored().full_optimizer(optimizer, rank0_only)

    @briefly
    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a whole state, such as the plain model's optimizer gave, of which each rank takes its part. Collective.

        Args:
            optimizer: One over parameters of the model, in the same groups and order.
            state: On every rank, such as from `torch.load(path, mmap=True)`: ranks of one machine share the memory.

        Raises:
            StateError: on every rank, with the optimizer as it was: groups or shapes that do not fit.
            OptimizerError: the optimizer holds other parameters than this model's.
        """
        self._stored().load_full_optimizer(optimizer, state)

    @briefly
    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        extra: Any = None,
        asynchronous: bool = False,
    ) -> Save:
        """Save the model, an optimizer and what else a run needs, to be loaded in any stage and world. Collective.

        The folder holds the previous checkpoint until the new one is complete on all ranks, whenever a rank is killed.
        Other files in it stay as they are.

        Args:
            folder: On a file system that all ranks share; where it is a symbolic link, the one that it leads to.
            optimizer: Any torch optimizer over parameters of the model.
            extra: What this rank wants back: its random state, its place in the data. Anything that pickles; its
                tensors come back on the CPU.
            asynchronous: Return once the state is copied to CPU memory, and write while training goes on.

        Returns the save; `result()` waits for its end and raises its error. A later save or load waits for it too.

        Raises:
            StateError: on every rank: it cannot be written, such as to a full disk; nothing of it is left there.
            OptimizerError: the optimizer holds other parameters than this model's.
        """
        return self._stored().save(folder, optimizer, extra, asynchronous)

    @briefly
    def load_checkpoint(self, folder: str | os.PathLike[str], optimizer: Optimizer | None = None) -> Any:
        """Load what `save_checkpoint` wrote, in any stage and world, after all of it was found right. Collective.

        Returns this rank's `extra`; a rank that the saving world did not have gets the first rank's. So it is with
        buffers that differ between ranks. Load checkpoints that you trust only: `extra` is unpickled, which runs
        code that it names.

        Raises:
            StateError: on every rank, with the model and the optimizer as they were: no checkpoint, a partial or a
                damaged one, one of another model or optimizer.
            OptimizerError: the optimizer holds other parameters than this model's.
        """
        return self._stored().load_checkpoint(folder, optimizer)
