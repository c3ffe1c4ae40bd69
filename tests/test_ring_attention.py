"""Attention in a ring: what its kernel gives of all tokens, on the CPU and with kernels of other devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.threads import Threads
from zcompile.torch_internals.ring_attention import arguments_of

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 32, 8
MASKS = ("attn_mask", "attn_bias")
aten = torch.ops.aten


class Kernels:
    """Kernels with the arguments and results of another device's, computed on the CPU step by step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        name = f"_scaled_dot_product_{kind}"
        self.forward_, self.backward_ = (getattr(aten, name + end).default for end in ("", "_backward"))

    def weights(self, given: dict[str, Any]) -> Tensor:
        """The logarithms of weights, before they are divided by their sum."""
        query, key, bias = given["query"], given["key"], given.get("attn_bias")
        assert bias is None or bias.stride(-2) % 16 == 0, "rows are aligned"
        assert given.get("max_q", query.shape[2]) == query.shape[2]
        assert given.get("max_k", key.shape[2]) == key.shape[2]
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH) + (0.0 if bias is None else bias)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf) if given["is_causal"] else scores

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = arguments_of(self.forward_, args, kwargs)
        assert given.get("compute_log_sumexp", True)
        weights = self.weights(given)
        out = weights.softmax(-1).nan_to_num() @ given["value"]
        logs = (sums := weights.logsumexp(-1)).masked_fill(sums == -math.inf, 0.0)  # of a query that sees nothing
        number = torch.zeros(())
        if self.kind == "efficient_attention":
            filled = torch.nn.functional.pad(logs, (0, -logs.shape[2] % 32), value=math.inf)
            return out, filled, number, number
        rest = (None, None, given["query"].shape[2], given["key"].shape[2], number, number, number)
        return out, logs.unsqueeze(-1) if "cudnn" in self.kind else logs, *rest

    def backward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = arguments_of(self.backward_, args, kwargs)
        logs, length = given["logsumexp"], given["query"].shape[2]
        assert logs.dim() == (4 if "cudnn" in self.kind else 3)
        assert logs.shape[2] == (math.ceil(length / 32) * 32 if "efficient" in self.kind else length)
        gradient = given.get("grad_out", given.get("grad_out_"))
        shares = (self.weights(given) - logs.reshape(*logs.shape[:2], -1)[..., :length, None]).exp()
        seen = gradient @ given["value"].transpose(-1, -2) - (gradient * given["out"]).sum(-1, keepdim=True)
        through = shares * seen / math.sqrt(WIDTH)
        result = through @ given["key"], through.transpose(-1, -2) @ given["query"], shares.transpose(-1, -2) @ gradient
        return (*result, None) if self.kind == "efficient_attention" else result


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of kernels that the CPU has meanwhile."""
    kind = request.param
    if kind == "flash_attention_for_cpu":
        yield kind
        return
    made = Kernels(kind)
    with torch.library._scoped_library("aten", "IMPL") as library:  # the public one cannot be taken back
        library.impl(f"_scaled_dot_product_{kind}", made.forward, "CPU")
        library.impl(f"_scaled_dot_product_{kind}_backward", made.backward, "CPU")
        yield kind


def masked(dtype: torch.dtype) -> Tensor:
    """A mask under which some queries see few keys, some those of one rank alone, and two none, or all a little."""
    mask = torch.where(torch.rand(1, 1, TOKENS, TOKENS) > 0.5, 0.0, -math.inf).to(dtype)
    mask[..., 3:9, :] = -math.inf
    mask[..., 4:6, 1] = 0.0
    mask[..., 12:14, :] = -1e9  # so that a logarithm of sums is not changed by how many keys there are
    return mask


def arguments(kind: str, seen: str, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """What kernels of a kind take behind queries, keys and values."""
    mask, flags = (masked(dtype) if seen == "masked" else None), [0.0, seen == "causal"]
    if kind in ("efficient_attention", "cudnn_attention"):
        return [mask, True, *flags], {}
    return flags, {} if mask is None else {"attn_mask": mask}


def behind(kind: str, given: list[Any], results: tuple[Any, ...]) -> list[Any]:
    """What its backward takes behind the logarithms of sums."""
    out, logs, *rest = results
    if kind == "flash_attention_for_cpu":
        return [out, logs, *given]
    if kind == "flash_attention":
        return [out, logs, *rest[:4], *given, *rest[4:6]]
    if kind == "efficient_attention":
        return [given[0], out, logs, *rest, given[2], [True, True, True, False], given[3]]
    return [out, logs, *rest[4:6], given[0], *rest[:4], *given[2:]]


def in_ring(rank: int, kind: str, seen: str, heads: int, dtype: torch.dtype) -> str:
    """Results of a rank are its part of those of one process."""
    ranks, name = dist.get_world_size(), f"_scaled_dot_product_{kind}"
    torch.manual_seed(0)
    chunks = torch.arange(TOKENS).chunk(2 * ranks)
    own = torch.cat([chunks[rank], chunks[-1 - rank]])
    numbers = [torch.randn(BATCH, TOKENS, count, WIDTH, dtype=dtype) for count in (HEADS, heads, heads, HEADS)]
    *tensors, gradient = (number.transpose(1, 2) for number in numbers)
    given, named = arguments(kind, seen, dtype)
    found = []
    for ring, part in (("", lambda x: x), ("ring", lambda x: x.index_select(2, own))):
        space: Any = torch.ops.zcompile if ring else aten
        divided = {"size": ranks, "group": dist.group.WORLD.group_name} if ring else {}  # type: ignore[union-attr]
        mine = [*map(part, tensors)]
        results = getattr(space, ring + name)(*mine, *given, **named, **divided)
        last = behind(kind, given, results)
        gradients = getattr(space, f"{ring}{name}_backward")(part(gradient), *mine, *last, **named, **divided)
        found.append([results[0], *gradients[:3]])
    near = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(found[1], [one.index_select(2, own) for one in found[0]], **near)
    assert [one.stride()[-1] for one in found[1]] == [1] * 4
    return ""


CASES = [
    *itertools.product(["flash_attention_for_cpu"], ("causal", "all", "masked"), (HEADS, 2), (2,), (torch.float32,)),
    ("flash_attention_for_cpu", "causal", 2, 4, torch.bfloat16),
    ("flash_attention_for_cpu", "masked", HEADS, 4, torch.float64),
    ("flash_attention_for_cpu", "causal", HEADS, 1, torch.float32),
    *itertools.product(["flash_attention"], ("causal", "all"), (HEADS,), (2, 4), (torch.float32,)),
    *itertools.product(["efficient_attention"], ("causal", "masked"), (HEADS,), (2, 4), (torch.float32,)),
    *itertools.product(["cudnn_attention"], ("causal", "masked"), (HEADS,), (2, 4), (torch.float32,)),
]


@pytest.mark.parametrize(("kernels", "seen", "heads", "ranks", "dtype"), CASES, indirect=["kernels"])
def test_a_ring_computes_what_its_kernel_does(
    threads: Threads, kernels: str, seen: str, heads: int, ranks: int, dtype: torch.dtype
) -> None:
    assert threads.run(ranks, in_ring, kernels, seen, heads, dtype) == [""] * ranks
