"""Local graphs: Dynamo graphs on DTensors, rewritten to take and return their local tensors.

    def forward(weight, x):                            def forward(weight, x):
        y = linear(x, weight)                              weight_whole = DTensor.from_local(weight, ...)
        return y                           ->              y = linear(x, weight_whole)
                                                           return y.to_local()

So tracing and execution of a graph see plain tensors, and the communication of DTensors as operations of the graph. The
gradient of a local tensor has the placements of the DTensor: sums over ranks have been reduced when it arrives.
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
    """The placeholder of a DTensor parameter in the module tree, and the leaf that graphs receive for it."""

    whole: nn.Parameter
    leaf: nn.Parameter

    def given(self) -> nn.Parameter:
        """Return the leaf, with the current `requires_grad` of the DTensor."""
        self.leaf.requires_grad_(self.whole.requires_grad)
        return self.leaf


Locals = Mapping[int, Local]
"""By the `id` of the DTensor."""
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""A backend of torch.compile."""


@dataclass(frozen=True)
class _Layout:
    """The layout of a DTensor of static shape, to create it differentiably from its local tensor."""

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
            fix = "let its module give a plain tensor, or fix the graph break that it comes from (see explain())"
            raise CaptureError(name, f"is a DTensor placed {tensor.placements}", fix)
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def whole(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class _Whole(nn.Module):
    """A module that a graph calls to create a DTensor from its local tensor."""

    def __init__(self, layout: _Layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, local: torch.Tensor) -> DTensor:
        return self.layout.whole(local)


def on_locals(
    module: fx.GraphModule, inputs: Sequence[Any], names: Names, locals_: Locals, compiler: Callable[[Names], Compiler]
) -> Callable[..., Any]:
    """Compile `module` on local tensors with `compiler`, which receives names of inputs; the result takes DTensors.

    Called while Dynamo compiles: example inputs are fake if Dynamo has not seen the tensor. Raise CaptureError for a
    DTensor of dynamic shape, or with placements other than Shard, Replicate and Partial.
    """
    taken = {i: value for i, value in enumerate(inputs) if isinstance(value, DTensor)}
    (results,) = module.graph.output_node().args
    examples = [r.meta.get("example_value") if isinstance(r, fx.Node) else None for r in _listed(results)]
    given = {i: _Layout.of(value, f"result {i}") for i, value in enumerate(examples) if isinstance(value, DTensor)}
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
    """Return `module` on local tensors; `taken`, `given`: indices of inputs and results that are DTensors."""
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
    """Return `names` for the local tensors in place of `inputs`."""
    pairs = list(zip(inputs, local, strict=True))
    known = {id(made): names.parameters[id(value)] for value, made in pairs if id(value) in names.parameters}
    # Code on DTensors reaches its mesh through hooks and closures, which give no readable name.
    meshes = {id(value): "mesh" for value in inputs if isinstance(value, DeviceMesh)}
    apart = {id(made) for value, made in pairs if isinstance(value, DTensor) and not _is_replicated(value)}
    return replace(names, parameters=known, others={**names.others, **meshes}, apart=frozenset(apart))


def _is_replicated(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _listed(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (list, tuple)) else [results]


def _local(value: Any, locals_: Locals) -> Any:
    """Return what a graph receives for a value: the leaf of a parameter, or the local tensor of another DTensor."""
    if not isinstance(value, DTensor):
        return value
    return locals_[id(value)].given() if id(value) in locals_ else value.to_local()
