"""Averages and shards that are sent in fewer bits, as in ZeRO++ (Wang et al. 2023, sections 3.3 and 3.1).

    bfloat16    rounded: a relative error of at most 2^-8
    int8        in blocks of 256 elements: an error of at most 1/254 of the block's largest element

Averages are summed in their own dtype, from the same decoded values on every rank, including those it has sent itself.
With more than two ranks, averages are encoded once more. A block with a value that is not finite decodes to such values
only, so that an overflow is still detected.

Blocks of shards do not span parameters: values do not depend on how parameters are grouped into messages.
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
    # A block of zeros is not divided by zero; one that is not finite is decoded as such by its scale.
    quantised = (blocks / scales.where(scales > 0, 1.0)).nan_to_num_().round_().to(wire)
    whole = quantised.view(rows, numel).view(torch.uint8), scales.view(rows, -1).contiguous().view(torch.uint8)
    return torch.cat(whole, dim=1)


def decode(sent: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Decode the result of `encode` to `dtype`, [rows, numel]."""
    if wire is torch.bfloat16:
        return sent.view(wire).to(dtype)
    rows = len(sent)
    count = sent.shape[1] // wire_bytes(BLOCK, wire)
    numel = count * BLOCK
    quantised = sent[:, :numel].contiguous().view(wire).view(rows, count, BLOCK)
    scales = sent[:, numel:].contiguous().view(torch.float32).view(rows, count, 1)
    return (quantised.to(torch.float32) * scales).view(rows, numel).to(dtype)


def parts_of(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split 1-D `flat` into the parts that ranks average, [ranks, numel], zero-padded; for two ranks [1, numel]."""
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
    """Encode shards of `numels` elements, end to end in 1-D `flat`, as bytes, 1-D uint8."""
    rows = flat[None]
    if wire is torch.int8:
        rows = torch.cat([padded_rows(shard) for shard in rows.split(list(numels), dim=1)], dim=1)
    return encode(rows, wire)[0]


def decode_shards(sent: torch.Tensor, numels: Sequence[int], wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Decode every rank's `encode_shards`, uint8 [ranks, bytes], to `dtype`, [ranks, elements], shards end to end."""
    rows = decode(sent, wire, dtype)
    if wire is torch.int8:
        padded = rows.split([padded_to_blocks(numel) for numel in numels], dim=1)
        shards = [shard[:, :numel] for shard, numel in zip(padded, numels, strict=True)]
        rows = torch.cat(shards, dim=1) if len(shards) > 1 else shards[0]
    return rows


def as_sent(flat: torch.Tensor, numels: Sequence[int], wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Shards as all ranks decode them once they are sent, in `dtype`; 1-D, like `flat`."""
    return decode_shards(encode_shards(flat, numels, wire)[None], numels, wire, dtype)[0]


def mean_of(sent: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The average of all ranks' encodings of one part, `sent`, summed in rank order, [numel]."""
    rows = decode(sent, wire, dtype)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(len(rows))
