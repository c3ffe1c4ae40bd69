"""Local graphs: graphs of Dynamo's on DTensors, made to take and give the local tensors that these consist of.

    def forward(weight, x):                            def forward(weight, x):
        y = linear(x, weight)                              weight_whole = DTensor.from_local(weight, ...)
        return y                           ->              y = linear(x, weight_whole)
                                                           return y.to_local()

So what traces and runs a graph sees plain tensors, and the communication of DTensors as operations of the graph. The
gradient of a local tensor is placed as the DTensor is: what is a sum over the ranks has been summed when it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from zcompile.errors import CaptureError
from zcompile.frontend.capture import Names
from zcompile.torch_internals.sizes import is_symbolic, of_fixed_sizes


@dataclass(frozen=True)
class Local:
    """What stands for a DTensor in the module tree, and the leaf that graphs are given for it."""

    whole: nn.Parameter
    leaf: nn.Parameter

    def given(self) -> nn.Parameter:
        """The leaf, as trainable as the DTensor is now."""
        self.leaf.requires_grad_(self.whole.requires_grad)
        return self.leaf


Locals = Mapping[int, Local]
"""By the identity of the DTensor."""
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""A backend of torch.compile."""


@dataclass(frozen=True)
class _Layout:
    """How a DTensor of fixed sizes is made from its local tensor, differentiably."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor, name: str) -> _Layout:
        if any(map(is_symbolic, tensor.shape)):
            fix = "call the model with one size, or let it take and give plain tensors: x.to_local()"
            raise CaptureError(name, "is a DTensor whose size varies between calls", fix)
        if not all(type(placement) in (Shard, Replicate, Partial) for placement in tensor.placements):
            fix = "let the module that makes it give a plain tensor, or fix the graph break behind it (see explain())"
            raise CaptureError(name, f"is a DTensor placed {tensor.placements}", fix)
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def whole(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class _Whole(nn.Module):
    """What a graph calls to make a DTensor."""

    def __init__(self, layout: _Layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, local: torch.Tensor) -> DTensor:
        return self.layout.whole(local)


def on_locals(
    module: fx.GraphModule, inputs: Sequence[Any], names: Names, locals_: Locals, compiler: Callable[[Names], Compiler]
) -> Callable[..., Any]:
    """What `compiler`, given names of inputs, makes of `module` on local tensors; it takes and gives DTensors.

    While Dynamo compiles: the example inputs are fakes where Dynamo has not seen the tensor. Raise CaptureError for a
    DTensor of sizes that vary, or of other placements than Shard, Replicate and Partial.
    """
    taken = {i: value for i, value in enumerate(inputs) if isinstance(value, DTensor)}
    (results,) = module.graph.output_node().args
    examples = [one.meta.get("example_value") if isinstance(one, fx.Node) else None for one in _listed(results)]
    given = {i: _Layout.of(one, f"result {i}") for i, one in enumerate(examples) if isinstance(one, DTensor)}
    if not taken and not given:
        return compiler(names)(module, inputs)
    made = _local_graph(module, taken, given)
    local = [of_fixed_sizes(_local(v, locals_)) if i in taken else v for i, v in enumerate(inputs)]
    compiled = compiler(_names_of_locals(names, inputs, local))(made, local)

    def call(*args: Any) -> Any:
        results = compiled(*(_local(value, locals_) for value in args))
        return tuple(given[i].whole(r) if i in given else r for i, r in enumerate(results)) if given else results

    return call


def _local_graph(module: fx.GraphModule, taken: Mapping[int, DTensor], given: Collection[int]) -> fx.GraphModule:
    """`module` on local tensors, for DTensors that it takes and gives at these places."""
    graph = fx.Graph()
    ends = list(_listed(graph.graph_copy(module.graph, {})))
    made = fx.GraphModule(module, graph)
    placeholders = graph.find_nodes(op="placeholder")
    for index, value in taken.items():
        node, name = placeholders[index], f"zcompile_whole_{index}"
        made.add_module(name, _Whole(_Layout.of(value, node.name)))
        with graph.inserting_after(placeholders[-1]):
            whole = graph.call_module(name, (node,))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
        ends = [whole if end is node else end for end in ends]
        node.meta.pop("example_value", None)
    for index in given:
        ends[index] = graph.call_method("to_local", (ends[index],))
    graph.output(tuple(ends))
    made.recompile()
    made.meta = dict(module.meta)
    return made


def _names_of_locals(names: Names, inputs: Sequence[Any], local: Sequence[Any]) -> Names:
    """What `names` says of `inputs`, of the local tensors in their places."""
    pairs = list(zip(inputs, local, strict=True))
    known = {id(made): names.parameters[id(one)] for one, made in pairs if id(one) in names.parameters}
    # Code on DTensors reaches its mesh by way of hooks and closures, which is no name to read.
    meshes = {id(one): "mesh" for one in inputs if isinstance(one, DeviceMesh)}
    apart = {id(made) for one, made in pairs if isinstance(one, DTensor) and not _is_replicated(one)}
    return replace(names, parameters=known, others={**names.others, **meshes}, apart=frozenset(apart))


def _is_replicated(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _listed(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (list, tuple)) else [results]


def _local(value: Any, locals_: Locals) -> Any:
    """What a graph is given for a value: the leaf of a parameter, the local tensor of another DTensor."""
    if not isinstance(value, DTensor):
        return value
    return locals_[id(value)].given() if id(value) in locals_ else value.to_local()
