"""Local inputs: graphs of Dynamo's that take DTensors, made to take the local tensors that these consist of.

    def forward(weight, x):                            def forward(weight, x):
        y = linear(x, weight)              ->              weight_whole = DTensor.from_local(weight, ...)
                                                           y = linear(x, weight_whole)

So what traces and runs a graph sees plain parameters, and the communication of DTensors as operations of the graph. The
gradient of a local tensor is placed as the DTensor is: what is a sum over the ranks has been summed when it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from zcompile._torch import of_fixed_sizes


@dataclass(frozen=True)
class Local:
    """What stands for a DTensor in the module tree, and the leaf that graphs are given for it."""

    whole: nn.Parameter
    leaf: nn.Parameter

    def given(self) -> nn.Parameter:
        """The leaf, as trainable as the DTensor is now."""
        self.leaf.requires_grad_(self.whole.requires_grad)
        return self.leaf


class _Whole(nn.Module):
    """A DTensor laid out like another, of its local tensor."""

    def __init__(self, like: DTensor) -> None:
        super().__init__()
        self.mesh, self.placements = like.device_mesh, like.placements
        self.shape, self.strides = like.shape, like.stride()

    def forward(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.strides
        )


def with_local_inputs(
    module: fx.GraphModule, inputs: Sequence[Any], locals_: Mapping[int, Local]
) -> tuple[fx.GraphModule, list[Any]]:
    """A graph that takes local tensors for those of its inputs that are in `locals_`, and its example inputs.

    While Dynamo compiles: the example inputs are fakes where Dynamo has not seen the tensor.
    """
    known = {index: locals_[id(value)] for index, value in enumerate(inputs) if id(value) in locals_}
    if not known:
        return module, list(inputs)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = fx.GraphModule(module, graph)
    placeholders = graph.find_nodes(op="placeholder")
    for index, local in known.items():
        node, name = placeholders[index], f"zcompile_whole_{index}"
        assert isinstance(local.whole, DTensor), "only DTensors have local tensors"
        made.add_module(name, _Whole(local.whole))
        with graph.inserting_after(placeholders[-1]):
            whole = graph.call_module(name, (node,))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
        node.meta.pop("example_value", None)
    made.recompile()
    made.meta = dict(module.meta)
    return made, [of_fixed_sizes(known[i].given()) if i in known else value for i, value in enumerate(inputs)]


def local_values(values: Sequence[Any], locals_: Mapping[int, Local]) -> list[Any]:
    """`values` with the leaves in place of the DTensors in `locals_`."""
    return [locals_[id(value)].given() if id(value) in locals_ else value for value in values]
