"""Losses of pipelines: what is a sum over the batch is told from what is a mean over its samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcompile
from zcompile.engine.step_trace import Called, StepTrace
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.model.units import make_layout
from zcompile.pipelining.batch_means import check_mean
from zcompile.schedule.options import Options

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y) ** 2


def penalty(model: nn.Module) -> torch.Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum() * 0.1


def balance(found: torch.Tensor) -> torch.Tensor:
    """A load-balancing loss (Fedus et al. 2021, equation 4)."""
    shares = found.flatten(0, 1).softmax(-1)
    chosen = F.one_hot(shares.argmax(-1), shares.shape[-1]).float()
    return 0.01 * shares.shape[-1] * (chosen.mean(0) * shares.mean(0)).sum()


def classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return model(x).flatten(0, 1), y.flatten(0, 1).argmax(1)


MEANS: dict[str, Loss] = {
    "mean": lambda m, x, y: squares(m, x, y).mean(),
    "a sum by rows": lambda m, x, y: squares(m, x, y).sum() / x.shape[0],
    "a sum by elements": lambda m, x, y: squares(m, x, y).sum() / y.numel(),
    "half of one": lambda m, x, y: 0.5 * squares(m, x, y).sum() / y.numel(),
    "a factor that is one by rows": lambda m, x, y: squares(m, x, y).sum() * (1 / x.shape[0]),
    "and a penalty": lambda m, x, y: squares(m, x, y).mean() + penalty(m),
    "by what counts": lambda m, x, y: (squares(m, x, y) * (y > 0)).sum() / (y > 0).sum(),
    "of sums of rows": lambda m, x, y: squares(m, x, y).sum(-1).mean(),
    "of several": lambda m, x, y: squares(m, x, y)[:, 0].mean() + squares(m, x, y)[:, 1].mean(),
    "of classes": lambda m, x, y: F.cross_entropy(*classes(m, x, y)),
    "of classes, by hand": lambda m, x, y: (
        F.cross_entropy(*classes(m, x, y), reduction="sum") / (x.shape[0] * x.shape[1])
    ),
    "of smoothed classes": lambda m, x, y: F.cross_entropy(*classes(m, x, y), label_smoothing=0.1),
    "of weighted classes": lambda m, x, y: F.cross_entropy(*classes(m, x, y), weight=torch.ones(2)),
    "batchmean": lambda m, x, y: F.kl_div(m(x).log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "and a balance of experts": lambda m, x, y: squares(m, x, y).mean() + balance(m(x)),
    "of rows of sums of means": lambda m, x, y: squares(m, x, y).mean((0, 1)).sum(),
    "stacked": lambda m, x, y: torch.stack([F.mse_loss(m(x), y), squares(m, x, y).mean()]).sum(),
    "the root of one": lambda m, x, y: squares(m, x, y).mean().sqrt(),
}
SUMS: dict[str, Loss] = {
    "sum": lambda m, x, y: squares(m, x, y).sum(),
    "negated": lambda m, x, y: -squares(m, x, y).sum(),
    "a hundredth": lambda m, x, y: squares(m, x, y).sum() * 0.01,
    "a factor that is a tensor": lambda m, x, y: squares(m, x, y).sum() * torch.tensor(0.5),
    "by the rows of another batch": lambda m, x, y: squares(m, x, y).sum() / 64,
    "and a penalty": lambda m, x, y: squares(m, x, y).sum() + penalty(m),
    "and a mean": lambda m, x, y: squares(m, x, y).mean() + squares(m, x, y).sum(),
    "of means": lambda m, x, y: squares(m, x, y).mean(-1).sum(),
    "of a part": lambda m, x, y: squares(m, x, y)[:, 0].sum(),
    "of classes": lambda m, x, y: F.cross_entropy(*classes(m, x, y), reduction="sum"),
    "of smoothed classes": lambda m, x, y: F.cross_entropy(*classes(m, x, y), reduction="sum", label_smoothing=0.1),
    "mse": lambda m, x, y: F.mse_loss(m(x), y, reduction="sum"),
    "l1": lambda m, x, y: F.l1_loss(m(x), y, reduction="sum"),
    "smooth l1": lambda m, x, y: F.smooth_l1_loss(m(x), y, reduction="sum"),
    "huber": lambda m, x, y: F.huber_loss(m(x), y, reduction="sum"),
    "bce": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), y.sigmoid(), reduction="sum"),
    "kl": lambda m, x, y: F.kl_div(m(x).log_softmax(-1), y.softmax(-1), reduction="sum"),
}


@pytest.mark.parametrize(("kind", "name"), [*(("mean", name) for name in MEANS), *(("sum", name) for name in SUMS)])
def test_sums_over_the_batch_are_refused_and_means_are_not(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(5, 2), {"mean": MEANS, "sum": SUMS}[kind][name]
    layout = make_layout(model, STAGES[0], (Axis("dp", AxisKind.SHARD, 2, 1),), None, Options().precision)
    called = Called(lambda x, y: loss(model, x, y), (torch.randn(6, 4, 5), torch.randn(6, 4, 2)), {}, ("x", "y"))
    traced = StepTrace(model, layout, called, torch.device("cpu"), "Linear").program
    if kind == "mean":
        check_mean(traced)
        return
    with pytest.raises(zcompile.OptionError, match="loss_fn: gives a sum over the batch"):
        check_mean(traced)
