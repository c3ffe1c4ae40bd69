"""CUDA graphs: regions are captured once by torch's CUDA graph trees, and replayed by one launch each.

A tree has a node for each call of a region on a path of calls. Results of nodes are in memory that they share, and that
the nodes of the next path overwrite. A path ends, and the next forward begins one, when nobody holds any of its
results. torch returns the same tensors each time, and cannot see references from outside of Python; but it sees another
tensor that aliases the same memory. So one tensor that a forward saves for its backward is replaced by such an alias,
which lives as long as autograd holds it: a forward before that backward continues the path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from zcompile.errors import OptionError
from zcompile.ir.region import Region
from zcompile.runtime.device import has_graphs
from zcompile.schedule.options import Options
from zcompile.torch_internals.autograd import keeps_graph
from zcompile.torch_internals.dynamo import captured
from zcompile.torch_internals.sizes import is_symbolic

MOST = 8
"""Forwards on one path. Each takes new recordings and memory, and without backwards there would be no end."""


class Graphs:
    """The CUDA graphs of one model, and its forwards whose backwards are still to come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._saved = WeakTensorKeyDictionary()
        """Saved tensors of forwards whose backwards are still to come."""
        self._forwards = 0
        """Number on the path, since no backward was pending."""

    @classmethod
    def wanted(cls, options: Options, device: torch.device) -> Graphs | None:
        """The graphs of a model, if its programs may use them; None on devices without CUDA graphs.

        Raises:
            OptionError: they are asked for on such a device.
        """
        if has_graphs(device):
            return cls(device)
        if options.cuda_graphs:
            fix = "leave it out, or move the model to a CUDA device"
            raise OptionError("cuda_graphs", f"needs a CUDA device, and the model is on {device}", fix)
        return None

    def captured(self, region: Region, run: Any) -> Any:
        """`run`, which computes a region, as nodes of the tree."""
        placeholders = region.graph.find_nodes(op="placeholder")
        sizes = [number for number, node in enumerate(placeholders) if is_symbolic(node.meta.get("val"))]
        assert region.fixed is not None, "a region that is not captured is run as it is"
        replay = captured(run, sizes, region.fixed, len(region.outputs), self._device.index or 0)

        def call(values: list[Any]) -> list[Any]:
            # A backward that keeps its graph frees nothing, but a tree expects a call to free the same each time.
            return run(values) if keeps_graph() or self._forwards > MOST else replay(values)

        return call

    def begin(self) -> None:
        """A forward begins."""
        self._forwards = self._forwards + 1 if self._saved else 1

    def mark(self, saved: list[torch.Tensor], made: int | None) -> None:
        """Note that a forward has `saved` these; `made`: index of one that is not an argument of the forward, if any.

        That one is replaced by another tensor of the same memory.
        """
        if made is None:
            return
        value = saved[made]
        # Not a view: that would be replaced by another one on its way to autograd.
        alias = value.new_empty(0).set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        self._saved[alias] = None
        saved[made] = alias
