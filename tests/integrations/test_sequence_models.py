"""Models of Transformers as they are, their tokens divided over ranks: the same training as of one process."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.compare import full
from tests.threads import Threads

pytest.importorskip("transformers", reason="needs transformers: make test-integrations")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

from tests.integrations.test_chunked_models import MODELS, batch, loss_of  # noqa: E402

NAMES = [name for name in MODELS if name not in ("distillation", "dpo")]


def against_one(rank: int, name: str, data: int, ranks: int, stage: int, how: str) -> str:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (data, ranks), mesh_dim_names=("dp", "sp"))
    model = MODELS[name]().train()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    options = {"mesh": mesh, "sequence": how, "stage": stage, "backend": "eager"}
    step = zcompile.train_step(model, loss_of, optimizers[0], **options)

    def given(index: int, number: int) -> dict[str, torch.Tensor]:
        """A batch as long as a ring can divide."""
        parts = batch(index, number)
        return {key: part[:, : part.shape[1] // (2 * ranks) * 2 * ranks].contiguous() for key, part in parts.items()}

    for number in range(3):
        found = step(**given(mesh["dp"].get_local_rank(), number))
        for index in range(data):
            wanted = loss_of(plain, **given(index, number))
            (wanted / data).backward()
            if index == mesh["dp"].get_local_rank():
                torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
        optimizers[1].step()
        optimizers[1].zero_grad()
    for (key, param), same in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            full(param.detach()), same.detach(), rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )
    return ""


FOUR = ("gpt2", "opt", "gpt_neox", "t5", "bert")
"""Models with four heads of keys."""
SHAPES = (1, 2, 3, "ulysses"), (2, 2, 2, "ulysses"), (1, 2, 0, "ulysses"), (1, 2, 1, "ring"), (2, 2, 3, "ring")
CASES = [(name, *shape) for name in NAMES for shape in SHAPES]


@pytest.mark.parametrize(
    ("name", "data", "ranks", "stage", "how"),
    [*CASES, *((name, 1, 4, 1, "ulysses") for name in FOUR), *((name, 1, 4, 2, "ring") for name in NAMES)],
)
def test_a_model_trains_on_divided_sequences(
    threads: Threads, name: str, data: int, ranks: int, stage: int, how: str
) -> None:
    world = data * ranks
    assert threads.run(world, against_one, name, data, ranks, stage, how) == [""] * world
