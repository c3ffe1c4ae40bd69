"""Averages and shards that travel in fewer bits, as in ZeRO++ (Wang et al. 2023, sections 3.3 and 3.1).

    bfloat16    rounded: each element is off by 2^-8 of itself at most
    int8        in blocks of 256 elements: each is off by 1/254 of the largest of its block at most

What averages arrive is summed in the dtype of the average, and every rank sums the same: what itself has sent, too, as
the others got it. Beyond two ranks averages travel so once more. Where a number is not finite, its block is not, so
that an overflow is still seen.

Of shards each parameter has blocks of its own: numbers do not depend on what travels in one message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcompile.ir.layout import BLOCK, padded_to_blocks, part_numel, wire_bytes


def encode(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """`values`, floating-point [rows, numel] of whole blocks, as bytes, uint8 [rows, wire_bytes(numel, wire)]."""
    if wire is torch.bfloat16:
        return values.to(wire).view(torch.uint8)
    rows, numel = values.shape
    blocks = values.to(torch.float32).view(rows, numel // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=-1, keepdim=True) / torch.iinfo(wire).max
    # Of a block of zeros nothing is divided by zero; one that is not finite is so by its scale.
    quantised = (blocks / scales.where(scales > 0, 1.0)).nan_to_num_().round_().to(wire)
    whole = quantised.view(rows, numel).view(torch.uint8), scales.view(rows, -1).contiguous().view(torch.uint8)
    return torch.cat(whole, dim=1)


def decode(sent: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """What `encode` gave, in `dtype`, [rows, numel]."""
    if wire is torch.bfloat16:
        return sent.view(wire).to(dtype)
    rows = len(sent)
    count = sent.shape[1] // wire_bytes(BLOCK, wire)
    numel = count * BLOCK
    quantised = sent[:, :numel].contiguous().view(wire).view(rows, count, BLOCK)
    scales = sent[:, numel:].contiguous().view(torch.float32).view(rows, count, 1)
    return (quantised.to(torch.float32) * scales).view(rows, numel).to(dtype)


def parts_of(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    """1-D `flat` in the parts that ranks average, [ranks, numel], padded with zeros; of two ranks all, [1, numel]."""
    rows = 1 if ranks == 2 else ranks
    numel = part_numel(flat.numel(), ranks)
    padded = flat.new_zeros(rows * numel)
    padded[: flat.numel()].copy_(flat)
    return padded.view(rows, numel)


def padded_rows(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, [ranks, numel], each padded with zeros to whole blocks."""
    if rows.shape[1] % BLOCK == 0:
        return rows
    padded = rows.new_zeros(len(rows), padded_to_blocks(rows.shape[1]))
    padded[:, : rows.shape[1]].copy_(rows)
    return padded


def encode_shards(flat: torch.Tensor, numels: Sequence[int], wire: torch.dtype) -> torch.Tensor:
    """Shards of `numels` elements, end to end in `flat`, 1-D, as bytes, 1-D uint8."""
    rows = flat[None]
    if wire is torch.int8:
        rows = torch.cat([padded_rows(shard) for shard in rows.split(list(numels), dim=1)], dim=1)
    return encode(rows, wire)[0]


def decode_shards(sent: torch.Tensor, numels: Sequence[int], wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """What `encode_shards` gave on each rank, [ranks, bytes], in `dtype`: shards end to end, [ranks, elements]."""
    rows = decode(sent, wire, dtype)
    if wire is torch.int8:
        padded = rows.split([padded_to_blocks(numel) for numel in numels], dim=1)
        shards = [shard[:, :numel] for shard, numel in zip(padded, numels, strict=True)]
        rows = torch.cat(shards, dim=1) if len(shards) > 1 else shards[0]
    return rows


def as_sent(flat: torch.Tensor, numels: Sequence[int], wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Shards as all ranks have them in `dtype`, once they have been sent; 1-D, like `flat`."""
    return decode_shards(encode_shards(flat, numels, wire)[None], numels, wire, dtype)[0]


def mean_of(sent: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The average of what ranks have sent of one part, summed in their order, [numel]."""
    rows = decode(sent, wire, dtype)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(len(rows))
