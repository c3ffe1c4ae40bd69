"""Random draws: each rank keeps its rows of what plain PyTorch would draw for the whole tensor.

    weight.normal_()      rank 0: rows 0..3 of the whole    rank 1: rows 4..7    (of DTensor's own: the same rows twice)

So ranks with equal seeds get the same numbers as in any other stage, and their generators stay equal, even on ranks
without rows. The memory of the whole is freed at once. With different seeds, each row is as its rank has drawn it, and
what several ranks keep is as the first of them has drawn it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from zcompile.errors import ParameterError
from zcompile.runtime.tensors.owned import owner_of, part_of, placed, set_owner
from zcompile.torch_internals.autograd import version_of
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only

_OVER_ANYTHING = frozenset(
    "normal_ uniform_ exponential_ geometric_ cauchy_ log_normal_ random_ bernoulli_ kaiming_uniform_ rand_like "  # noqa: SIM905
    "randn_like randint_like eye".split()
)
"""Functions that do not read the values of the tensor that they write to, or whose shape they take."""
OF_WHOLE = _OVER_ANYTHING | frozenset(
    "normal bernoulli poisson binomial multinomial dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout "  # noqa: SIM905
    "feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ dropout1d dropout2d dropout3d native_dropout "
    "rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ gumbel_softmax svd_lowrank pca_lowrank lobpcg __setitem__ "
    "argmax argmin mse_loss l1_loss smooth_l1_loss huber_loss".split()
)
"""Names of functions that draw random numbers, write or return indices into the whole, or take means, which DTensor
averages over ranks equally, however many rows each has."""
ALONG = ("any", "all")
"""Functions that DTensor sums along the divided dimension, as counts, in place of a logical result."""
_OF_OTHER_ROWS = frozenset([*ALONG, "argmax", "argmin", "multinomial", "svd_lowrank", "pca_lowrank", "lobpcg"])
"""Functions whose results are not elements of the tensor, whatever their shape."""
_FIX = "compute it in the forward of the module that owns it, or take its full_tensor() on every rank"


@dataclass(frozen=True)
class Draw:
    """One call of a function that draws.

    Args:
        name: The function's name.
        first: The first tensor among its arguments.
        watched: Context for collectives.
        explain: Makes a result one whose collectives are watched, too.
    """

    name: str
    first: DTensor
    watched: Callable[[], contextlib.AbstractContextManager[None]]
    explain: Callable[[DTensor], object]

    def result(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call `func`, and divide what it returns and writes. Collective if ranks share a part, or tensors are read.

        Raises:
            ParameterError: it would be differentiated; or it writes a sum whose parts have not been added yet.
        """
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, DTensor)}
        wholes = {key: self._whole(tensor) for key, tensor in tensors.items()}
        before = {key: version_of(whole) for key, whole in wholes.items()}
        given: Any = tree_map_only(DTensor, lambda tensor: wholes[id(tensor)], (args, dict(kwargs)))
        result = func(*given[0], **given[1])
        with torch.no_grad():
            for key, whole in wholes.items():
                if version_of(whole) != before[key]:
                    self._write(tensors[key], whole)
        written = {id(whole): tensors[key] for key, whole in wholes.items()}
        return tree_map_only(
            torch.Tensor, lambda made: written[id(made)] if id(made) in written else self._kept(made), result
        )

    def _whole(self, tensor: DTensor) -> torch.Tensor:
        """Memory for a whole tensor, with its values if the function reads them."""
        local = local_tensor(tensor)
        if tensor is self.first and self.name in _OVER_ANYTHING:
            whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)
        else:
            detached: Any = tensor.detach()
            whole = detached.full_tensor().clone()
        # So that torch refuses in-place writes to a leaf that requires a gradient.
        return whole.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())

    def _write(self, tensor: DTensor, whole: torch.Tensor) -> None:
        if any(placement.is_partial("sum") for placement in tensor.placements):
            problem = f"{self.name} writes it before its parts are added"
            raise ParameterError("a sum over shards", problem, "take its full_tensor() first")
        mine = part_of(whole.detach(), tensor)
        local_tensor(tensor).copy_(self._from_first_rank(mine, [not one.is_shard() for one in tensor.placements]))

    def _kept(self, whole: torch.Tensor) -> DTensor:
        """This rank's part of a result: its rows if it is shaped like the first tensor, otherwise all of it."""
        first = self.first
        if whole.requires_grad:
            problem = f"{self.name} reads this parameter outside of a program, where it is sharded"
            raise ParameterError(getattr(first, "zcompile_name", "a parameter"), problem, _FIX)
        is_like = whole.shape == first.shape and self.name not in _OF_OTHER_ROWS
        placements = [one if is_like and one.is_shard() else Replicate() for one in first.placements]
        mine = part_of(whole, first).clone() if is_like else whole
        mine = self._from_first_rank(mine, [one.is_replicate() for one in placements])
        made = placed(mine, first.device_mesh, placements, whole.shape)
        self.explain(made)
        set_owner(made, owner_of(first) if is_like else None)
        return made

    def _from_first_rank(self, mine: torch.Tensor, along: list[bool]) -> torch.Tensor:
        """`mine` of the first rank `along` these dimensions of the mesh."""
        mesh = self.first.device_mesh
        groups = [mesh.get_group(dim) for dim, alike in enumerate(along) if alike and mesh.size(dim) > 1]
        if not groups or not mine.numel():
            return mine
        sent = mine.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
        flat = sent.view(-1).view(torch.uint8)  # gloo knows few dtypes
        with self.watched():
            for group in groups:
                dist.broadcast(flat, group=group, group_src=0)
        return sent.to(mine.device)
