"""Models in plain PyTorch: recurrent, convolutional, graphs, recommenders, and networks of science."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families.family import ROWS, Batch, Family, drawn, integers, normal, single, uniform

VOCABULARY, WIDTH, LENGTH, SIDE, CLASSES, NODES, EDGES = 61, 16, 9, 16, 7, 11, 30


# -- batches --------------------------------------------------------------------------------------------------------


def texts(generator: torch.Generator) -> Batch:
    given = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return {"x": given[:, :-1], "y": given[:, 1:]}


pictures = drawn(
    x=normal(ROWS, 3, SIDE, SIDE),
    y=integers(0, CLASSES, ROWS),
    map=integers(0, CLASSES, ROWS, SIDE, SIDE),
    noise=normal(ROWS, WIDTH),
)
graphs = drawn(x=normal(NODES, WIDTH), edges=integers(0, NODES, 2, EDGES), y=integers(0, CLASSES, NODES))
clicks = drawn(
    dense=normal(ROWS, 5),
    sparse=integers(0, VOCABULARY, 3, 4 * ROWS),
    offsets=lambda _: torch.arange(0, 4 * ROWS, 4),
    y=lambda generator: torch.rand(ROWS, generator=generator).round(),
)
points = drawn(x=uniform(ROWS * 8, 3), functions=normal(ROWS * 8, 10), y=uniform(ROWS * 8, 4))


# -- models ---------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model of an LSTM or a GRU."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, both: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(2 * WIDTH if both else WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(x))
        return self.head(states)


class Cells(nn.Module):
    """A loop over time steps of a cell, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[0], WIDTH, dtype=torch.float32), []
        for word in self.embedding(x).unbind(1):
            state = self.cell(word, state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class TemporalConvolutions(nn.Module):
    """Dilated causal convolutions with weight normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, dilation=1 << depth)) for depth in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        value = self.embedding(x).transpose(1, 2)
        for depth, layer in enumerate(self.layers):
            value = value + F.relu(layer(F.pad(value, (2 << depth, 0))))
        return self.head(value.transpose(1, 2))


class Translator(nn.Module):
    """`nn.Transformer` as a language model of its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, dim_feedforward=24, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask, value = nn.Transformer.generate_square_subsequent_mask(x.shape[1]), self.embedding(x)
        return self.head(self.transformer(value, value, mask, mask, src_is_causal=True, tgt_is_causal=True))


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, CLASSES)),
    )


def vgg_bn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(48, CLASSES)),
    )


class UNet(nn.Module):
    """Two levels, with a connection across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = self.down(x)
        return self.head(torch.cat([across, self.up(self.middle(across))], 1))


class GraphConvolution(nn.Module):
    """Sums of neighbours by `index_add`, divided by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degrees = x.new_ones(x.shape[0]).index_add(0, target, x.new_ones(edges.shape[1]))
        for depth, layer in enumerate(self.layers):
            value = layer(x)
            x = value.index_add(0, target, value[source]) / degrees[:, None]
            x = F.relu(x) if depth == 0 else x
        return x


class GraphAttention(nn.Module):
    """A softmax over the edges of each node, by `scatter_reduce` and `scatter_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        (source, target), value = edges, self.value(x)
        scores = F.leaky_relu(self.score(torch.cat([value[source], value[target]], 1))).squeeze(1)
        largest = scores.new_full((x.shape[0],), -1e9).scatter_reduce(0, target, scores.detach(), "amax")
        weights = (scores - largest[target]).exp()
        sums = x.new_zeros(x.shape[0]).scatter_add(0, target, weights).clamp(min=1e-6)
        messages = value[source] * (weights / sums[target])[:, None]
        gathered = torch.zeros_like(value).scatter_add(0, target[:, None].expand_as(messages), messages)
        return self.head(F.elu(gathered))


class Recommender(nn.Module):
    """DLRM: bags of embeddings, products of all pairs, and two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(8 + 6, 1)

    def forward(self, dense: Tensor, sparse: Tensor, offsets: Tensor) -> Tensor:
        value = self.bottom(dense)
        found = [value, *(bag(ids, offsets) for bag, ids in zip(self.bags, sparse, strict=True))]
        stacked = torch.stack(found, 1)
        rows, columns = torch.triu_indices(4, 4, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([value, pairs], 1)).squeeze(1)


class Factors(nn.Module):
    """Matrix factorization with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(VOCABULARY, 8), nn.Embedding(VOCABULARY, 8)
        self.user_bias, self.item_bias = nn.Embedding(VOCABULARY, 1), nn.Embedding(VOCABULARY, 1)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        biases = self.user_bias(user) + self.item_bias(item)
        return (self.users(user) * self.items(item)).sum(1) + biases.squeeze(1) + self.bias


class RadianceField(nn.Module):
    """NeRF: sines of positions, a skip, a density and a colour."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))
        self.first, self.second = nn.Linear(27, WIDTH), nn.Linear(WIDTH + 27, WIDTH)
        self.density, self.colour = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        waves = (x[..., None] * self.get_buffer("frequencies")).flatten(1)
        coded = torch.cat([x, waves.sin(), waves.cos()], 1)
        value = F.relu(self.second(torch.cat([F.relu(self.first(coded)), coded], 1)))
        return torch.cat([F.softplus(self.density(value)), self.colour(value).sigmoid()], 1)


class OperatorNetwork(nn.Module):
    """DeepONet: a branch for the function, a trunk for the place."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.trunk = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, functions: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("np,np->n", self.branch(functions), self.trunk(x)) + self.bias


class Flow(nn.Module):
    """RealNVP: couplings whose Jacobian is triangular."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)) for _ in range(3)
        )

    def forward(self, y: Tensor) -> Tensor:
        first, second = y.chunk(2, 1)
        volume = y.new_zeros(y.shape[0])
        for coupling in self.couplings:
            scale, shift = coupling(first).chunk(2, 1)
            first, second = second * scale.tanh().exp() + shift, first
            volume = volume + scale.tanh().sum(1)
        return (0.5 * (first.square() + second.square()).sum(1) - volume).mean()


# -- losses ---------------------------------------------------------------------------------------------------------


def next_words(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def maps(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["map"])


def nodes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["edges"]), batch["y"])


def clicked(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["sparse"], batch["offsets"]), batch["y"])


def ratings(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["sparse"][0, :ROWS], batch["sparse"][1, :ROWS]), batch["y"])


def colours(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def operators(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["functions"], batch["x"]), batch["y"][:, 0])


def likelihood(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["y"])


FAMILIES: tuple[Family, ...] = (
    single("lstm", "torch", lambda: Recurrent(nn.LSTM), texts, next_words),
    single("gru_both_ways", "torch", lambda: Recurrent(nn.GRU, both=True), texts, next_words),
    single("gru_cell", "torch", Cells, texts, next_words),
    single("temporal_convolutions", "torch", TemporalConvolutions, texts, next_words),
    single("nn_transformer", "torch", Translator, texts, next_words),
    single("lenet", "torch", lenet, pictures, classes),
    single("vgg_bn", "torch", vgg_bn, pictures, classes),
    single("unet", "torch", UNet, pictures, maps),
    single("gcn", "torch", GraphConvolution, graphs, nodes),
    single("gat", "torch", GraphAttention, graphs, nodes),
    single("dlrm", "torch", Recommender, clicks, clicked),
    single("matrix_factorization", "torch", Factors, clicks, ratings),
    single("nerf", "torch", RadianceField, points, colours),
    single("deeponet", "torch", OperatorNetwork, points, operators),
    single("real_nvp", "torch", Flow, points, likelihood),
)
