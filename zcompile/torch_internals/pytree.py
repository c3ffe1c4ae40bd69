"""Nested containers of values."""

from __future__ import annotations

from torch.utils._pytree import (  # leaves of nested containers
    register_pytree_node,
    tree_leaves,
    tree_map_only,
)
from torch.utils._pytree import tree_leaves_with_path as leaves_by_path

__all__ = ["leaves_by_path", "register_pytree_node", "tree_leaves", "tree_map_only"]
"""Names re-exported unchanged from torch."""
