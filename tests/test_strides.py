"""What Inductor compiles keeps the strides that were recorded when the step was traced."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zcompile
from tests.cases import quickly
from zcompile.engine.region_strides import keep_strides
from zcompile.torch_internals.inductor import compile_with_inductor, force_stride_order
from zcompile.torch_internals.sizes import FakeTensorMode, empty_laid_out

WIDTH, HEADS, GROUPS = 32, 4, 2


def rotated(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * 0.8 + torch.cat((-right, left), -1) * 0.6


class Block(nn.Module):
    """Grouped-query attention with rotated halves and Hugging Face's cache: an empty tensor, and one to append."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        k, v = (torch.cat([torch.empty(0, device=x.device), part], -2) for part in (k, v))
        keys, values = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2)), k


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for layer in self.layers:
            x, keys = layer(x)
            kept.append(keys)
        return x.square().mean(), kept


@pytest.mark.nightly
def test_attention_with_a_cache_trains_as_eager_and_returns_its_strides() -> None:
    torch.manual_seed(0)
    model = Decoder()
    reference = copy.deepcopy(model)
    compiled = zcompile.compile(model, stage=3, backend="inductor")
    for size in (3, 5):  # the second makes the size of a batch vary
        x = torch.randn(size, 12, WIDTH)
        (loss, kept), (want, reference_kept) = compiled(x), reference(x)
        (loss + kept[0].mean()).backward()
        (want + reference_kept[0].mean()).backward()
        assert [keys.stride() for keys in kept] == [keys.stride() for keys in reference_kept]
    for ours, theirs in zip(compiled.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_memory_with_an_offset_ends_with_its_last_element() -> None:
    made = empty_laid_out((2, 3), (4, 1), 5, torch.float32, torch.device("cpu"))
    assert (made.shape, made.stride(), made.storage_offset()) == ((2, 3), (4, 1), 5)
    assert made.untyped_storage().nbytes() == 4 * (5 + 4 + 3)


def cat(x: Tensor) -> Tensor:
    return torch.ops.aten.cat.default([(x * 2).transpose(1, 2)], -1)


@pytest.mark.parametrize(
    "function",
    [
        cat,
        lambda x: cat(x)[..., :3],
        lambda x: cat(x).unsqueeze(1).expand(-1, 3, -1, -1),
        lambda x: cat(x.transpose(0, 1)).transpose(0, 2),
        lambda x: (x * 2 + 1)[..., :3],
    ],
    ids=["dense", "sliced", "expanded", "transposed", "part of a sum"],
)
def test_results_of_inductor_have_the_recorded_strides(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 6, 8)
    graph = make_fx(lambda x: (function(x),), tracing_mode="fake")(x)
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    keep_strides(graph, inputs)
    (result,), want = compile_with_inductor(graph, inputs)([x]), function(x)
    assert torch.equal(result, want)
    assert result.stride() == want.stride()


def test_a_graph_is_left_alone_whose_strides_inductor_keeps() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 6, 8)
    graph = make_fx(lambda x: F.layer_norm(x.transpose(1, 2).softmax(-1), (6,)), tracing_mode="fake")(x)
    before = graph.code
    keep_strides(graph, [x])
    assert graph.code == before


def test_a_value_that_is_seen_in_part_is_laid_out_as_recorded() -> None:
    """In the U-Net of diffusers Inductor computed each half of a sum alone, dense, which the next region refused."""
    graph = make_fx(lambda x: (x.sin() * 2).split(3, 1), tracing_mode="fake")(torch.randn(4, 6, 8))
    keep_strides(graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    forced = [node for node in graph.graph.nodes if node.target is force_stride_order()]
    assert [(node.args[0].target, node.args[1]) for node in forced] == [(torch.ops.aten.mul.Tensor, [48, 8, 1])]


class Channel(nn.Module):
    """One channel of a convolution, which is not dense, goes into the next unit's region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.head = nn.Linear(10, 10), nn.Conv2d(1, 3, 3, padding=1), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.first(x.transpose(0, 1)).transpose(0, 1)
        return self.head(self.wide(turned[:, None])[:, 0])


@pytest.mark.nightly
@quickly("sizes", [[(2, 3)], [(2, 3), (4, 5)]], [[(2, 3), (4, 5)]], slow=())
def test_a_part_of_a_convolution_keeps_its_strides(sizes: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = Channel()
    compiled = zcompile.compile(copy.deepcopy(model), stage=0, units=["head"])
    for size in sizes:
        x = torch.randn(*size, 10)
        torch.testing.assert_close(compiled(x), model(x))
