"""Attention to tokens that the ranks of a group divide, for graphs: `torch.ops.zcompile.ring_scaled_dot_product_...`.

For each kernel of scaled dot-product attention, and its backward, there is an operator that takes the same arguments,
and `size` and `group` besides: each rank gives the queries, keys and values (batch, heads, tokens, width) of its own
tokens, and gets their results. Blocks of keys and values go round, each sent on while it is computed with, and results
of blocks are merged by the logarithms of their sums of exponentials (Ring Attention, Liu et al., 2023).

Tokens are in zig-zag order: of 2 * size chunks, rank r has numbers r and 2 * size - 1 - r. So a causal mask leaves as
much to compute on every rank (The Llama 3 Herd of Models, 2024, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zcompile.torch_internals.group_operators import group_of_name
from zcompile.torch_internals.operators import OpOverload, defaults_of

_KINDS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
"""The kinds of attention that give the logarithms of their sums."""
OF_TOKENS = frozenset({"query", "key", "value", "grad_out", "grad_out_", "out", "logsumexp"})
"""The arguments of which each rank gives those of its tokens, along dimension 2; all ranks have the others."""
_MASKS = ("attn_mask", "attn_bias")
_LIBRARY = torch.library.Library("zcompile", "FRAGMENT")


def kernel_of(ring: object) -> OpOverload | None:
    """Return the kernel that such an operator runs for each block; None of any other operator."""
    return _KERNELS.get(ring)


def arguments_of(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by name."""
    names = (argument.name for argument in operator._schema.arguments)
    return {**defaults_of(operator), **dict(zip(names, args, strict=False)), **kwargs}


class _Ring:
    """One call of an operator: a kernel, and what it is given by this rank, by name."""

    def __init__(self, kernel: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.kernel, given = kernel, arguments_of(kernel, args, kwargs)
        self.size, self.group = given.pop("size"), group_of_name(given.pop("group"))
        self.rank, self.given = self.group.rank(), given
        self.query, self.key, self.value = given["query"], given["key"], given["value"]
        self.mask: Tensor | None = next((given[name] for name in _MASKS if given.get(name) is not None), None)
        self.sums = torch.promote_types(self.query.dtype, torch.float32)
        """The dtype in which blocks are added up."""

    def forward(self) -> tuple[Any, ...]:
        given, total, top, weight = tuple[Any, ...](), *(torch.empty(0) for _ in range(3))
        for source, (key, value) in self._round():
            rows, columns, mask = *self._seen(source), self._masked(source)
            result = self._block(source, rows, columns, key, value, mask)
            out, block_logs = result[0].to(self.sums), self._logs(result[1], rows).clone()
            if mask is not None:  # a query that sees nothing of a block has no part of it, whatever kernels give then
                hidden = (mask == -math.inf).all(-1)
                out, block_logs = out.masked_fill(hidden.unsqueeze(-1), 0.0), block_logs.masked_fill(hidden, -math.inf)
            if not given:
                given, total, top, weight = result, out, block_logs, torch.ones_like(block_logs)
                continue
            # Not one logarithm: it would not change, were a weight added to one of -1e9, that of a masked query.
            highest = torch.maximum(top[:, :, rows], block_logs)
            added = (block_logs - highest).exp().nan_to_num(0.0)  # nothing, where neither is seen
            both = weight[:, :, rows] * (top[:, :, rows] - highest).exp().nan_to_num(0.0) + added
            share = (added / both).nan_to_num(0.0)
            total[:, :, rows] = torch.lerp(total[:, :, rows], out, share.to(self.sums).unsqueeze(-1))
            top[:, :, rows], weight[:, :, rows] = highest, both
        logs = top + weight.log()
        logs = logs.masked_fill(logs == -math.inf, 0.0)  # as the kernels give it for what sees nothing
        return (_like(given[0], total), _like(given[1], self._as_kernels(logs)), *given[2:])

    def backward(self) -> tuple[Any, ...]:
        given = self.given
        gradient = next(name for name in ("grad_out", "grad_out_") if name in given)
        logs = self._logs(given["logsumexp"], slice(None))
        result, total, sums = tuple[Any, ...](), torch.empty(0), torch.empty(0)
        sent: dist.Work | None = None
        for source, (key, value) in self._round():
            rows, columns = self._seen(source)
            changed = {name: given[name][:, :, rows] for name in (gradient, "out")}
            changed |= {"logsumexp": self._as_kernels(logs[:, :, rows].contiguous())}
            found = self._block(source, rows, columns, key, value, self._masked(source), **changed)
            if sent is None:
                result, total = found, found[0].to(self.sums)
                arrived = torch.cat([one.reshape(-1).to(self.sums) for one in found[1:3]])
            else:
                total[:, :, rows] += found[0]
                sent.wait()  # those of the same block, from the rank that has computed with it before
                arrived = sums
                for whole, one in zip(self._apart(arrived), found[1:3], strict=True):
                    whole[:, :, columns] += one
            sums = torch.empty_like(arrived)
            sent = self._send(arrived, sums)
        if sent is not None:
            sent.wait()
        key_sum, value_sum = self._apart(sums)
        return (_like(result[0], total), _like(result[1], key_sum), _like(result[2], value_sum), *result[3:])

    def _round(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the keys and values of each rank, its own first; they are sent on until the next are asked for.

        The current stream waits for what it has sent before it drops the memory, and for what arrives before it
        reads it; a collective begins after all that the stream has been given.
        """
        block = torch.cat([self.key.reshape(-1), self.value.reshape(-1)])
        for step in range(self.size):
            arriving = torch.empty_like(block) if step + 1 < self.size else None
            sent = None if arriving is None else self._send(block, arriving)
            yield (self.rank - step) % self.size, self._apart(block)
            if sent is not None and arriving is not None:
                sent.wait()
                block = arriving

    def _send(self, block: Tensor, arriving: Tensor) -> dist.Work:
        """Send a block to the next rank, and receive that of the one before."""
        leaves, arrives = [0] * self.size, [0] * self.size
        leaves[(self.rank + 1) % self.size] = arrives[(self.rank - 1) % self.size] = block.numel()
        work: dist.Work = dist.all_to_all_single(arriving, block, arrives, leaves, group=self.group, async_op=True)
        return work

    def _apart(self, block: Tensor) -> list[Tensor]:
        """Return the keys and the values of a block, as views of it."""
        parts = block.split([self.key.numel(), self.value.numel()])
        return [part.view(like.shape) for part, like in zip(parts, (self.key, self.value), strict=True)]

    def _seen(self, source: int) -> tuple[slice, slice]:
        """Return the queries that see keys of another rank, and these: under a causal mask, half of either."""
        everything, half = slice(None), self.query.shape[2] // 2
        if not self.given["is_causal"] or source == self.rank:
            return everything, everything
        return (everything, slice(half)) if source < self.rank else (slice(half, None), everything)

    def _block(
        self, source: int, rows: slice, columns: slice, key: Tensor, value: Tensor, mask: Tensor | None, **changed: Any
    ) -> tuple[Any, ...]:
        """Return what the kernel gives of a block."""
        query, key, value = self.query[:, :, rows], key[:, :, columns], value[:, :, columns]
        known = {"max_q": query.shape[2], "max_k": key.shape[2], "compute_log_sumexp": True}
        known |= dict.fromkeys(_MASKS, mask) | {"is_causal": self.given["is_causal"] and source == self.rank}
        changed |= {"query": query, "key": key, "value": value}
        changed |= {name: value for name, value in known.items() if name in self.given}
        result: tuple[Any, ...] = self.kernel(**{**self.given, **changed})
        return result

    def _masked(self, source: int) -> Tensor | None:
        """Return the mask of this rank's queries and another one's keys; CUDA's kernels want aligned rows."""
        if (mask := self.mask) is None:
            return None
        for dim, rank in ((-2, self.rank), (-1, source)):
            if mask.shape[dim] > 1:
                chunks = mask.unflatten(dim, (2 * self.size, -1)).unbind(dim - 1)
                mask = torch.cat([chunks[rank], chunks[2 * self.size - 1 - rank]], dim)
        columns = mask.shape[-1]
        return F.pad(mask, (0, -columns % 16))[..., :columns]

    def _logs(self, logs: Tensor, rows: slice) -> Tensor:
        """Return the logarithms of sums, (batch, heads, tokens), as a kernel gives them."""
        length = self.query[:, :, rows].shape[2]
        return logs.reshape(*self.query.shape[:2], -1)[:, :, :length]

    def _as_kernels(self, logs: Tensor) -> Tensor:
        """Return logarithms of sums as the kernel's backward takes them."""
        name = self.kernel.overloadpacket.__name__
        if "efficient" in name:  # in multiples of 32, of which it reads no more than there are queries
            return F.pad(logs, (0, -logs.shape[2] % 32), value=math.inf)
        return logs.unsqueeze(-1) if "cudnn" in name else logs


def _like(given: Tensor, value: Tensor) -> Tensor:
    """Return a value in the dtype and the memory layout of what the kernel has given, as graphs expect them."""
    return torch.empty_like(given).copy_(value)


def _registered(kernel: OpOverload) -> OpOverload:
    name = f"ring{kernel.overloadpacket.__name__}"
    arguments, _, results = str(kernel._schema).partition("(")[2].rpartition(" -> ")
    schema = f"{name}({arguments.removesuffix(')')}, int size, str group) -> {results}"
    _LIBRARY.define(schema, tags=tuple(kernel.tags))
    backward = name.endswith("_backward")

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        ring = _Ring(kernel, args, kwargs)
        return ring.backward() if backward else ring.forward()

    def fake(*args: Any, size: int, group: str, **kwargs: Any) -> Any:
        given = arguments_of(kernel, args, kwargs)
        return kernel(**{**given, **({"compute_log_sumexp": True} if "compute_log_sumexp" in given else {})})

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zcompile::{name}", fake, lib=_LIBRARY)
    ring: OpOverload = getattr(torch.ops.zcompile, name).default
    return ring


_ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{end}") for kind in _KINDS for end in ("", "_backward")
]
RINGS: Mapping[OpOverload, OpOverload] = {packet.default: _registered(packet.default) for packet in _ATTENTION}
"""The operators, by their kernels."""
_KERNELS: Mapping[object, OpOverload] = {ring: kernel for kernel, ring in RINGS.items()}
