"""Losses of pipelines: what is a sum over the batch is told from what is a mean over its samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcompile
from tests.cases import quickly
from zcompile.engine.step_trace import CallSpec, StepTrace
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.model.units import make_layout
from zcompile.pipelining.batch_means import check_mean
from zcompile.schedule.options import Options
from zcompile.torch_internals.inductor import loss_decompositions

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
    "einsum by rows": lambda m, x, y: torch.einsum("btc,btc->", m(x), y) / x.shape[0],
    "einsum of a mean": lambda m, x, y: torch.einsum("bt,bt->b", m(x)[..., 0], y[..., 0]).mean(),
    "norms of rows": lambda m, x, y: (m(x) - y).norm(dim=-1).mean(),
    "the largest of rows": lambda m, x, y: squares(m, x, y).amax((1, 2)).mean(),
    "a product with a weight": lambda m, x, y: (m(x).mean((0, 1)) @ torch.ones(2)) + squares(m, x, y).mean(),
    "a norm of parameters": lambda m, x, y: squares(m, x, y).mean() + next(m.parameters()).norm(),
    "guarded": lambda m, x, y: torch.where((y > 0).sum() > 0, squares(m, x, y).mean(), 0.0),
    "by what counts, clamped": lambda m, x, y: squares(m, x, y).sum() * (1 / (y > 0).sum().clamp(min=1)),
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
    "einsum": lambda m, x, y: torch.einsum("btc,btc->", m(x), y),
    "einsum of three": lambda m, x, y: torch.einsum("btc,btc,c->", m(x), y, torch.ones(2)),
    "dot": lambda m, x, y: torch.dot(m(x).flatten(), y.flatten()),
    "matmul": lambda m, x, y: (m(x).view(1, -1) @ y.view(-1, 1)).squeeze(),
    "tensordot": lambda m, x, y: torch.tensordot(m(x), y, 3),
    "the trace of a product": lambda m, x, y: (m(x).flatten(1) @ y.flatten(1).t()).trace(),
    "the norm of order 1": lambda m, x, y: torch.linalg.vector_norm(m(x) - y, 1),
    "under a root": lambda m, x, y: squares(m, x, y).sum().sqrt(),
    "under a root, divided behind it": lambda m, x, y: squares(m, x, y).sum().sqrt() / x.shape[0],
    "einsum by the rows of another batch": lambda m, x, y: torch.einsum("btc,btc->", m(x), y) / 64,
}
OTHERS: dict[str, Loss] = {
    "norm": lambda m, x, y: (m(x) - y).norm(),
    "norm by rows": lambda m, x, y: (m(x) - y).norm() / x.shape[0],
    "vector_norm": lambda m, x, y: torch.linalg.vector_norm(m(x) - y),
    "matrix_norm": lambda m, x, y: torch.linalg.matrix_norm((m(x) - y).flatten(1)),
    "norm squared": lambda m, x, y: (m(x) - y).norm() ** 2,
    "a mean and a norm": lambda m, x, y: squares(m, x, y).mean() + 0.1 * m(x).norm(),
    "norm by what counts": lambda m, x, y: (m(x) - y).norm() / (y > 0).sum(),
    "max": lambda m, x, y: squares(m, x, y).max(),
    "amax": lambda m, x, y: squares(m, x, y).amax(),
    "logsumexp": lambda m, x, y: squares(m, x, y).logsumexp((0, 1, 2)),
    "prod": lambda m, x, y: squares(m, x, y).prod(),
    "the end of cumsum": lambda m, x, y: squares(m, x, y).mean((1, 2)).cumsum(0)[-1],
    "the first sample": lambda m, x, y: squares(m, x, y).mean((1, 2))[0],
    "median": lambda m, x, y: squares(m, x, y).median(),
    "var": lambda m, x, y: m(x).var(),
    "std": lambda m, x, y: m(x).std(),
}


KINDS = {"mean": MEANS, "sum": SUMS, "other": OTHERS}
BY_MICROBATCHES = {"by what counts", "by what counts, clamped", "the root of one", "and a balance of experts"}
"""Means that are those of micro-batches, as with accumulated gradients: how many count, and roots, are of each."""


CASES = [(kind, name) for kind, losses in KINDS.items() for name in losses]


@quickly("kind, name", CASES, CASES[::8], slow=CASES)
def test_sums_over_the_batch_are_refused_and_means_are_not(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(5, 2), KINDS[kind][name]
    layout = make_layout(model, STAGES[0], (Axis("dp", AxisKind.SHARD, 2, 1),), None, Options().precision)
    batch = torch.randn(6, 4, 5), torch.randn(6, 4, 2)
    called = CallSpec(lambda x, y: loss(model, x, y), batch, {}, ("x", "y"))
    given = model, layout, called, torch.device("cpu"), "Linear"
    traced = [
        StepTrace(*given, options={"decompositions": loss_decompositions(fuses=fuses)}).program
        for fuses in (False, True)
    ]  # a cross entropy is one line or many
    parts = [loss(model, *part) for part in zip(*(one.chunk(3) for one in batch), strict=True)]
    is_mean = torch.allclose(torch.stack(parts).mean(), loss(model, *batch), rtol=1e-5)
    assert is_mean is (kind == "mean") or name in BY_MICROBATCHES
    says = "a sum" if kind == "sum" else r"\w+\(\)"
    for program in traced:
        if kind == "mean":
            check_mean(program)
            continue
        with pytest.raises(zcompile.OptionError, match=rf"loss_fn: returns {says} over the batch .*batch_means.py:\d+"):
            check_mean(program)
