"""Families that are trained on more than one loss, output or model: GANs, policies, VAEs, teachers, physics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families.family import ROWS, Batch, Family, Models, Phase, drawn, integers, normal, single, uniform

WIDTH, ACTIONS, CLASSES = 12, 4, 7


rows = drawn(
    x=normal(ROWS, WIDTH),
    other=normal(ROWS, WIDTH),
    noise=normal(ROWS, WIDTH),
    action=integers(0, ACTIONS, ROWS),
    reward=uniform(ROWS),
    y=integers(0, CLASSES, ROWS),
)


def network(out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LeakyReLU(0.2), nn.Linear(2 * WIDTH, out))


# -- two models and two optimizers ----------------------------------------------------------------------------------


def pair() -> dict[str, nn.Module]:
    return {"discriminator": network(1), "generator": network(WIDTH)}


def discriminated(models: Models, batch: Batch) -> Tensor:
    with torch.no_grad():
        made = models["generator"](batch["noise"])
    given = models["discriminator"](torch.cat([batch["x"], made])).squeeze(1)
    return F.binary_cross_entropy_with_logits(given, torch.cat([torch.ones(ROWS), torch.zeros(ROWS)]))


def generated(models: Models, batch: Batch) -> Tensor:
    given = models["discriminator"](models["generator"](batch["noise"])).squeeze(1)
    return F.binary_cross_entropy_with_logits(given, torch.ones(ROWS))


def criticised(models: Models, batch: Batch) -> Tensor:
    """WGAN-GP: with the norm of a gradient in the loss."""
    with torch.no_grad():
        made = models["generator"](batch["noise"])
    between = (0.3 * batch["x"] + 0.7 * made).requires_grad_()
    (gradient,) = torch.autograd.grad(models["discriminator"](between).sum(), between, create_graph=True)
    real, fake = models["discriminator"](torch.cat([batch["x"], made])).chunk(2)
    return fake.mean() - real.mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


def deep_q() -> dict[str, nn.Module]:
    return {"online": network(ACTIONS), "target": network(ACTIONS).requires_grad_(False)}


def temporal_difference(models: Models, batch: Batch) -> Tensor:
    with torch.no_grad():
        wanted = batch["reward"] + 0.9 * models["target"](batch["other"]).amax(1)
    return F.smooth_l1_loss(models["online"](batch["x"]).gather(1, batch["action"][:, None]).squeeze(1), wanted)


# -- one model of several parts -------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    """A policy and a value of one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = network(WIDTH), nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = self.body(x).tanh()
        return self.actor(value), self.critic(value).squeeze(1)


def advantage(model: nn.Module, batch: Batch) -> Tensor:
    scores, value = model(batch["x"])
    policy = torch.distributions.Categorical(logits=scores)
    gain = batch["reward"] - value
    surprise = -(policy.log_prob(batch["action"]) * gain.detach()).mean()
    return surprise + 0.5 * gain.square().mean() - 0.01 * policy.entropy().mean()


class TwoHeads(nn.Module):
    """A class and a regression, in a dictionary; a third head is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unread = network(WIDTH), nn.Linear(WIDTH, 2)
        self.kind, self.size = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        value = self.body(x)
        return {"kind": self.kind(value), "size": self.size(value), "unread": self.unread(value)}


def both(model: nn.Module, batch: Batch) -> Tensor:
    given = model(batch["x"])
    return F.cross_entropy(given["kind"], batch["y"]) + F.mse_loss(given["size"].squeeze(1), batch["reward"])


class VariationalAutoencoder(nn.Module):
    """Draws by the noise that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(2 * WIDTH), network(WIDTH)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def evidence(model: nn.Module, batch: Batch) -> Tensor:
    given, mean, log_variance = model(batch["x"], batch["noise"])
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return F.mse_loss(given, batch["x"]) + 0.1 * divergence


class Siamese(nn.Module):
    """One encoder for both of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = network(WIDTH), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        left, right = F.normalize(self.encoder(x)), F.normalize(self.encoder(other))
        return self.scale.exp() * left @ right.T


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    scores, places = model(batch["x"], batch["other"]), torch.arange(ROWS)
    return (F.cross_entropy(scores, places) + F.cross_entropy(scores.T, places)) / 2


class Distilled(nn.Module):
    """A student beside its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = network(CLASSES).requires_grad_(False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.teacher(x), self.student(x)


def distillation(model: nn.Module, batch: Batch) -> Tensor:
    teacher, student = model(batch["x"])
    return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


class Physics(nn.Module):
    """The residual of an equation: a derivative of a network's output is part of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.network(x).sum(), x, create_graph=True)
        return slope.sum(1)


def residual(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["reward"]).square().mean()


FAMILIES: tuple[Family, ...] = (
    Family("gan", "torch", pair, rows, (Phase("discriminator", discriminated), Phase("generator", generated))),
    Family("wgan_gp", "torch", pair, rows, (Phase("discriminator", criticised), Phase("generator", generated))),
    Family("dqn", "torch", deep_q, rows, (Phase("online", temporal_difference),)),
    single("actor_critic", "torch", ActorCritic, rows, advantage),
    single("two_heads", "torch", TwoHeads, rows, both),
    single("vae", "torch", VariationalAutoencoder, rows, evidence),
    single("siamese", "torch", Siamese, rows, contrast),
    single("distillation", "torch", Distilled, rows, distillation),
    single("pinn", "torch", Physics, rows, residual),
)
