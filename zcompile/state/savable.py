"""Methods to save and load: whole state, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import Optimizer

from zcompile.errors import briefly
from zcompile.state.model_state import ModelState, Save


class Savable:
    """Saves and loads a model whose parameters are shards: whole, in one file, or as a checkpoint of all ranks."""

    def _stored(self) -> ModelState:
        """The object that reads and writes the state.

        Raises:
            StateError: the model is not divided yet.
        """
        raise NotImplementedError

    @briefly
    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """Return the whole state dict in CPU memory, which the plain model can load. Collective.

        Parameters are gathered one at a time. Values do not share memory, even of tied parameters. Buffers are those of
        the mesh's first rank. The result is empty on all other ranks, unless `rank0_only=False`.
        """
        return self._stored().full(rank0_only)

    @briefly
    def load_full_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a whole state dict, such as the plain model's. Collective.

        Args:
            state: Either given on every rank, and each takes its rows; or only on the mesh's first rank, which sends
                one parameter at a time, and None or an empty mapping on the others.

        Raises:
            StateError: a name, shape or dtype does not match; raised on every rank, before anything is written.
        """
        self._stored().load_full(state)

    @briefly
    def save_full_state_dict(self, path: str | os.PathLike[str]) -> None:
        """Write `full_state_dict()` to one file, atomically. Collective; the mesh's first rank writes.

        Args:
            path: A safetensors file if it ends in `.safetensors`, else a file for `torch.load`.

        Raises:
            StateError: the file cannot be written, or safetensors is not installed; raised on every rank.
        """
        self._stored().save_full(path)

    @briefly
    def full_optimizer_state_dict(self, optimizer: Optimizer, *, rank0_only: bool = True) -> dict[str, Any]:
        """Return the optimizer's whole state dict in CPU memory, which a plain model's optimizer can load. Collective.

        Tensors are gathered one at a time. The result is empty on all ranks but the mesh's first, unless
        `rank0_only=False`.

        Raises:
            StateError: the ranks have different parameters, as pipeline stages do; raised on every rank.
            OptimizerError: the optimizer holds parameters that are not in this model.
        """
        return self._stored().full_optimizer(optimizer, rank0_only)

    @briefly
    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a whole optimizer state dict, such as a plain model's optimizer's; each rank takes its part. Collective.

        Args:
            optimizer: An optimizer over parameters of the model, in the same groups and order.
            state: Given on every rank. With `torch.load(path, mmap=True)`, ranks of one machine share its memory.

        Raises:
            StateError: groups or shapes do not match; raised on every rank, with the optimizer unchanged.
            OptimizerError: the optimizer holds parameters that are not in this model.
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
        """Save a checkpoint of the model, an optimizer and extra values, loadable in any stage and world. Collective.

        The previous checkpoint in the folder is kept until the new one is complete on all ranks, even if ranks are
        killed. Other files in the folder are not touched.

        Args:
            folder: A folder on a file system that all ranks share; a symbolic link is followed.
            optimizer: Any torch optimizer over parameters of the model.
            extra: Values of this rank, such as its random state and its position in the data. Anything that can be
                pickled; tensors are loaded on the CPU.
            asynchronous: Return once the state is copied to CPU memory, and write while training continues.

        Returns a `Save`, whose `result()` waits for completion and raises its error. Later saves and loads wait, too.

        Raises:
            StateError: it cannot be written, for instance on a full disk; raised on every rank; its files are removed.
            OptimizerError: the optimizer holds parameters that are not in this model.
        """
        return self._stored().save(folder, optimizer, extra, asynchronous)

    @briefly
    def load_checkpoint(self, folder: str | os.PathLike[str], optimizer: Optimizer | None = None) -> Any:
        """Load a checkpoint of `save_checkpoint` in any stage and world, after checking all of it. Collective.

        Returns this rank's `extra`. Ranks beyond the saving world get the first rank's `extra`, and its buffers if
        buffers differ between ranks. Load only checkpoints that you trust: unpickling `extra` can run arbitrary code.

        Raises:
            StateError: there is no complete checkpoint, it is damaged, or it is of another model or optimizer; raised
                on every rank, with the model and the optimizer unchanged.
            OptimizerError: the optimizer holds parameters that are not in this model.
        """
        return self._stored().load_checkpoint(folder, optimizer)
