"""Tensor parallelism: models whose parameters are DTensors over another mesh dimension before they are sharded.

    mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    compiled = zcompile.compile(model, mesh=mesh["dp"])

The local part of a parameter on a tensor-parallel rank is sharded like a whole parameter. The model's code runs on
DTensors, as it does without zcompile; graphs receive their local tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from zcompile.errors import GroupError, ModelError, OptionError
from zcompile.ir.axis import AxisKind
from zcompile.ir.operation import line_of
from zcompile.ir.program import Program
from zcompile.ir.side_effects import changes_division, group_of, is_collective
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator, as_one, data_axes
from zcompile.runtime.tensors.parameter import ShardedParameter
from zcompile.runtime.tensors.placement import ModelParallel
from zcompile.torch_internals.dtensor import flattened, joint_mesh, local_tensor, with_joined_dims


def model_parallel(model: nn.Module, mesh: DeviceMesh | None, *, flat: bool = False) -> ModelParallel | None:
    """Return how parameters of `model` are divided in addition to the data-parallel `mesh`; None if they are not.

    `flat`: shards are divided over all dimensions of `mesh` as if it had one. Collective.

    Raises:
        ModelError: parameters are divided differently than by `parallelize_module`, or over several meshes.
        GroupError: `mesh` is not the other dimension of the same mesh.
    """
    own = check_divided(model)
    if own is None:
        return None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            fix = "give the model values before zcompile.compile: model.to_empty(device=...), and its init_weights()"
            raise ModelError(name, "is on the meta device, and the model is tensor-parallel", fix)
    joint, ranks, data = _joint(mesh, own)
    if flat and mesh is not None and mesh.ndim > 1:
        joint, data = with_joined_dims(joint, as_one(mesh), own), (AxisKind.SHARD,)
    return ModelParallel(own, joint, ranks, divided_parameters(model), data)


_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
}
"""Torch's styles by their names in Hugging Face's `tp_plan`."""


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the model's own plan, its attribute `tp_plan`, for `parallelize_module`.

        parallelize_module(model, mesh["tp"], zcompile.tensor_parallel_plan(model))

    Hugging Face models have one with names of styles; other models may have a dict from module patterns to styles.

    Raises:
        ModelError: the model has no plan, or its plan has a style that torch does not have.
    """
    found = getattr(model, "tp_plan", None)
    if not isinstance(found, Mapping) or not found:
        fix = "give it an attribute tp_plan: a dict of module patterns to styles, such as {'layers.*.up': 'colwise'}"
        raise ModelError(type(model).__name__, "has no tensor-parallel plan", fix)
    plan = dict[str, ParallelStyle]()
    for pattern, style in found.items():
        if not isinstance(style, ParallelStyle) and style not in _STYLES:
            problem = f"has a tensor-parallel plan with {style!r} for {pattern!r}"
            raise ModelError(
                type(model).__name__, problem, f"write a plan of {', '.join(_STYLES)}, or of torch's styles"
            )
        plan[pattern] = style if isinstance(style, ParallelStyle) else _STYLES[style]()
    return plan


def check_divided(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which parameters of `model` are divided; None if they are not.

    Raises:
        ModelError: parameters are divided differently than by `parallelize_module`, or over several meshes.
    """
    for name, buffer in model.named_buffers():
        if isinstance(buffer, DTensor):
            raise ModelError(name, "is a buffer and a DTensor", "keep buffers plain: buffer.full_tensor()")
    divided = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    if not divided:
        return None
    first, example = next(iter(divided.items()))
    for name, param in divided.items():
        _check_placement(name, param)
        if param.device_mesh != example.device_mesh:
            problem = f"lies on {param.device_mesh}, and {first} on {example.device_mesh}"
            raise ModelError(name, problem, "divide all parameters over one tensor-parallel mesh")
    return example.device_mesh


def divided_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of which ranks have different parts."""
    return frozenset(name for name, param in model.named_parameters() if not _is_replicated(param))


def _check_placement(name: str, param: DTensor) -> None:
    if isinstance(param, ShardedParameter):
        raise ModelError(name, "is sharded by zcompile already", "compile a model once")
    if param.device_mesh.ndim != 1 or not isinstance(param.placements[0], (Shard, Replicate)):
        problem = f"is placed {param.placements} on {param.device_mesh}"
        raise ModelError(name, problem, "divide it over one dimension of a mesh, by Shard or Replicate")
    placement, size = param.placements[0], param.device_mesh.size()
    if isinstance(placement, Shard) and param.numel():
        height = param.shape[placement.dim]
        if -(-height // -(-height // size)) < size:
            problem = f"has {height} rows on dim {placement.dim}, which leave some of {size} ranks without any"
            raise ModelError(name, problem, "replicate it, or use a smaller tensor-parallel mesh")


def _joint(data: DeviceMesh | None, model: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh, tuple[AxisKind, ...]]:
    """Return the joint mesh, the same flattened, and the kinds of `data`'s axes; raise GroupError. Collective."""
    names = model.mesh_dim_names or ("tp",)
    fix = f"give the other dimension of the mesh of {names[0]!r}: mesh=mesh['dp']"
    if data is None:
        raise GroupError("mesh", f"is missing, and parameters are divided over {model}", fix)
    if data == model:
        raise GroupError("mesh", f"is {data}, and parameters are divided over {model}", fix)
    try:
        joint = joint_mesh(data, model)
        ranks = joint.mesh.flatten()
        if not torch.equal(ranks, ranks.sort().values):  # torch cannot reduce over dimensions in another order
            raise ValueError("the data-parallel dimension comes after it")
        return joint, flattened(joint), tuple(data_axes(data).values())
    except (RuntimeError, KeyError, ValueError) as error:
        fix = f"{fix}, the data-parallel one before it, as in init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        raise GroupError("mesh", f"cannot be combined with {model}: {error}", fix) from error


def check_replicated(model: nn.Module, parallel: ModelParallel, everyone: Agreement, *, first: bool) -> ModelParallel:
    """Check that replicated parameters have the same values on all tensor-parallel ranks.

    Collective over all ranks that have a part of the model. `first`: True on the ranks whose values all others get.

    Returns `parallel` with the buffers that differ between ranks added to its divided tensors.

    Raises:
        ModelError: a replicated parameter differs; raised on every rank.
    """
    plain: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if _is_replicated(p)}
    buffers = dict(model.named_buffers())
    found = _differing({**plain, **buffers}, parallel, everyone.communicator.device) if first else []
    shared = everyone.share("what is not divided", json.dumps(found))
    differing = {name for text in shared for name in json.loads(text)}
    for name in plain:
        if name in differing:
            problem = f"is not divided over {parallel.mesh}, and has other values on other ranks of it"
            raise ModelError(name, problem, "seed all ranks alike before the model is built, or broadcast its values")
    return replace(parallel, divided=parallel.divided | differing)


def _differing(tensors: Mapping[str, torch.Tensor], parallel: ModelParallel, device: torch.device) -> list[str]:
    """Return the names of tensors that differ between ranks. Collective over the tensor-parallel mesh."""
    if not tensors:
        return []
    sums = torch.stack([_checksum(local_tensor(tensor)).cpu() for tensor in tensors.values()])
    most, least = Communicator(parallel.mesh, device).any_rank(torch.stack([sums, -sums])).unbind()
    # Overflow is safe: int64 wraps the same way on all ranks, also when negated.
    zipped = zip(tensors, most.tolist(), least.tolist(), strict=True)
    return [name for name, high, low in zipped if high != -low]


def _is_replicated(param: torch.Tensor) -> bool:
    return not isinstance(param, DTensor) or isinstance(param.placements[0], Replicate)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Return an order-sensitive checksum of the bits of `values`, an int64 scalar tensor."""
    factors = torch.arange(1, _PIECE + 1, device=values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in values.contiguous().view(-1).view(torch.uint8).split(_PIECE):
        total.mul_(31).add_((piece * factors[: piece.numel()]).sum())
    return total


_PIECE = 2**18
"""Bytes that are summed at a time; each takes eight bytes of temporaries."""


def check_collectives(traced: Program, parallel: ModelParallel | None) -> None:
    """Raise OptionError if a step whose tokens are divided has collectives that are not those of tensor parallelism.

    Over other ranks, with other tokens, they would give something else of parts than of whole values.
    """
    if traced.layout.sequence is None:
        return
    group = None if parallel is None else parallel.mesh.get_group().group_name
    for node in traced.graph.nodes:
        if is_collective(node) and not changes_division(node) and group_of(node) != group:
            what = f"cannot divide {node.name} ({line_of(node)}): it is a collective of the model's own"
            raise OptionError("sequence", what, "leave one of the two out")
