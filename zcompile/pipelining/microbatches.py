"""Batches: cut into micro-batches, and compared by their values."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from zcompile.errors import OptionError
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only

SAME_DATA = "let all ranks along 'pp' read the same data: samplers count the ranks along 'dp' alone"
"""What to do where ranks along the pipeline axis have other batches."""


def microbatches_of(
    batch: tuple[Any, ...], named: dict[str, Any], count: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each of `count` micro-batches is given; tensors without dimensions are the same in all.

    Raises:
        OptionError: the batch cannot be cut.
    """
    tensors = [leaf for leaf in tree_leaves((batch, named)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        raise OptionError("batch", "has a tensor with requires_grad, which would get no gradient", "detach it")
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        problem = f"cuts batches along dimension 0, and tensors of this one have {sorted(sizes)} rows"
        raise OptionError("microbatches", problem, "let all that loss_fn is given have a row for each sample")
    if any(size % count for size in sizes):
        problem = f"is {count}, which does not divide a batch of {min(sizes)}"
        raise OptionError("microbatches", problem, "give batches that it divides")

    def part(number: int) -> Any:
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(count)[number] if tensor.dim() else tensor

        return tree_map_only(torch.Tensor, rows, (batch, named))

    return [part(number) for number in range(count)]


def digest_of(batch: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Of the values of a batch."""
    found = hashlib.sha256()
    for leaf in tree_leaves((batch, named)):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
