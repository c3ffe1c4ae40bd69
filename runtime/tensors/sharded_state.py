"""State dicts with shards, which refuse pickling: a reader of the file would have one rank's part of the state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from torch.distributed.tensor import DTensor

from zcompile.errors import StateError
from zcompile.torch_internals.pytree import register_pytree_node, tree_leaves

Self = TypeVar("Self", bound=dict[Any, Any])


def _refuse(_: Self, __: object = None) -> NoReturn:
    problem = "holds this rank's shards, which are not the state of the plain model, so it is not pickled"
    fix = "save compiled.full_state_dict(), or a checkpoint: compiled.save_checkpoint(folder, optimizer)"
    raise StateError("state_dict()", problem, fix)


def _copied(state: Self) -> Self:
    made = type(state)(state)
    made.__dict__.update(state.__dict__)
    return made


def _deep_copied(state: Self, memo: dict[int, Any]) -> Self:
    made = type(state)((key, copy.deepcopy(value, memo)) for key, value in state.items())
    made.__dict__.update(copy.deepcopy(state.__dict__, memo))
    return made


class ShardedModelState(OrderedDict[str, Any]):
    """A model's state, some of it shards."""

    __reduce_ex__, __copy__, __deepcopy__ = _refuse, _copied, _deep_copied


class ShardedOptimizerState(dict[str, Any]):
    """An optimizer's state, some of it shards."""

    __reduce_ex__, __copy__, __deepcopy__ = _refuse, _copied, _deep_copied


def model_state_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's state, in a class that refuses pickling if it has shards."""
    if not any(isinstance(value, DTensor) for value in state.values()):
        return state
    made = ShardedModelState(state)
    made.__dict__.update(getattr(state, "__dict__", {}))
    return made


def optimizer_state_of(state: dict[str, Any]) -> dict[str, Any]:
    """The same for an optimizer."""
    return ShardedOptimizerState(state) if any(isinstance(leaf, DTensor) for leaf in tree_leaves(state)) else state


def _register(kind: type[dict[str, Any]]) -> None:
    """Register it with torch's pytree as the dict that it is."""

    def made(values: Iterable[Any], names: Any) -> dict[str, Any]:
        return kind(zip(names, values, strict=True))

    register_pytree_node(kind, lambda state: (list(state.values()), list(state)), made)


_register(ShardedModelState)
_register(ShardedOptimizerState)
