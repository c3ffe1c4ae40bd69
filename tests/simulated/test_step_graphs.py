"""A train step as one CUDA graph on the simulated device: the bits of steps without it, one launch, nothing stale."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.models import batch, make
from tests.ranks import Ranks
from tests.simulated.test_graphs import Drawing, values
from tests.test_checkpointing import Dropping
from zcompile import CaptureError, OptimizerError, OptionError, ParameterError, ZcompileError
from zcompile.torch_internals.pytree import tree_leaves

STEPS = 7
RATE = 2**-7
"""A power of two, so that it is the same number in float32 on the device."""
GRAPH = "a CUDA graph"


class Masked(nn.Module):
    """Its region calls what makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return (self.second(hidden.masked_select(hidden > 0).sum() + hidden) - y).square().mean()


class Signs(torch.optim.Optimizer):
    """Adds signs of gradients up, for a while in a new tensor each time, or as soon as `late` is set."""

    def __init__(self, params: Any, lr: float, *, replaces: bool = False) -> None:
        super().__init__(params, {"lr": lr, "late": False, "replaces": replaces})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if group["late"] or group["replaces"]:
                    sums = state.get("sums", torch.zeros_like(param))
                    state["sums"] = sums + param.grad.sign() if group["replaces"] else sums.add_(param.grad.sign())
                param.sub_(param.grad.sign(), alpha=group["lr"])


class Training:
    """A train step, and what it needs for the next one."""

    def __init__(self, rank: int, graphs: bool, kind: str = "gpt", **options: Any) -> None:
        torch.manual_seed(0)
        torch.cuda.manual_seed(0)
        self.rank, self.kind, self.graphs = rank, kind, graphs
        self.model = (Drawing() if kind == "drawing" else make(kind)).cuda()
        make_optimizer = options.pop("optimizer", torch.optim.AdamW)
        given = {"lr": RATE, **({"capturable": not graphs} if make_optimizer is torch.optim.AdamW else {})}
        loss_fn = options.pop("loss_fn", None)
        parameters = [*self.model.parameters()]
        if options.pop("outside", False):
            OUTSIDE[:] = [nn.Parameter(torch.full((), 2.0, device="cuda"))]
            parameters += OUTSIDE
        self.optimizer = make_optimizer(parameters, **given)
        if options.pop("scaled", False):
            options["grad_scaler"] = torch.amp.GradScaler("cuda", init_scale=2.0**18, growth_interval=2)
        if sizes := options.pop("mesh", None):
            names = options.pop("names", ("replicate", "shard"))
            options["mesh"] = init_device_mesh("cuda", sizes, mesh_dim_names=names)
        options |= {"backend": "eager", "cuda_graphs": "step" if graphs else False}
        self.step = zcompile.train_step(self.model, loss_fn, self.optimizer, **options)
        fragment = self.step._fragment
        fragment._traced = fragment._traced.traced  # by its own guards, not by what tests share

    def given(self, number: int, size: int = 4) -> list[torch.Tensor]:
        return [one.cuda() for one in batch("mlp" if self.kind == "drawing" else self.kind, self.rank, number, size)]


Way = Callable[[Training, int], Any]


def plainly(training: Training, number: int) -> Any:
    return training.step(*training.given(number))


def varying(training: Training, number: int) -> Any:
    """Shapes differ from step to step; on the second rank in other steps."""
    return training.step(*training.given(number, size=2 + (number + training.rank) % 2))


def scheduled(training: Training, number: int) -> Any:
    """The learning rate changes in every step, the weight decay once."""
    training.optimizer.param_groups[0].update(lr=2.0 ** -(5 + number), weight_decay=0.1 if number < 5 else 0.2)
    return plainly(training, number)


def evaluating(training: Training, number: int) -> Any:
    """Evaluations keep full parameters, which a step has to gather anew; so does a forward without its backward."""
    with torch.no_grad():
        before = training.step.evaluate(*training.given(number + 20))
    result = plainly(training, number)
    training.step.model(*training.given(number + 40))
    return before, result, training.step.evaluate(*training.given(number + 20)).detach()


def loading(training: Training, number: int) -> Any:
    """The optimizer's state is replaced in the middle, and parameters are written to."""
    result = plainly(training, number)
    if number == 4:
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    if number == 5:
        with torch.no_grad():
            for parameter in training.step.model.parameters():
                parameter.mul_(0.5)
    return result


def freezing(training: Training, number: int) -> Any:
    if number in (3, 5):
        next(iter(training.step.model.parameters())).requires_grad_(number == 5)
    return plainly(training, number)


def resetting(training: Training, number: int) -> Any:
    if number == 4:
        torch.compiler.reset()
    return plainly(training, number)


def changing(training: Training, number: int) -> Any:
    """The model has another attribute, and is in evaluation mode for a while."""
    training.model.train(number != 5)
    training.model.scale = 1.0 + (number > 3)  # type: ignore[assignment]
    return plainly(training, number)


def storing(training: Training, number: int) -> Any:
    """The model's code keeps a value, which belongs to whoever reads it; the batch is expanded, and sliced."""
    x, y = training.given(number)
    result = training.step(x, y[:1].expand(4, 1) if number % 2 else y)
    return result, training.model.last


def moving(training: Training, number: int) -> Any:
    """Parameters and buffers get other memory, and stay the same objects; clipping changes."""
    result = plainly(training, number)
    if number == 4:
        for one in (*training.model.parameters(), *training.model.buffers()):
            one.data = one.data.clone() * 0.5
    if number == 5:
        training.step.clip_grad_norm = 0.25
    return result


def beside(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A parameter outside of the model is trained, too."""
    return metrics(model, x, y)[0] * OUTSIDE[0]


OUTSIDE: list[nn.Parameter] = []


def metrics(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    error, hidden = model(x, y)
    return error.square().mean() * getattr(model, "scale", 1.0), {"hidden": hidden.mean(), "most": error.max()}


CASES: dict[str, tuple[Way, dict[str, Any]]] = {
    **{f"stage {stage}": (plainly, {"stage": stage}) for stage in range(4)},
    "no prefetch": (plainly, {"prefetch": 0}),
    "bf16": (plainly, {"dtype": torch.bfloat16}),
    "checkpoint": (plainly, {"checkpoint": "unit"}),
    "chunks": (plainly, {"chunk": 8}),
    "scaled": (plainly, {"dtype": torch.float16, "scaled": True, "optimizer": partial(torch.optim.AdamW, fused=True)}),
    "clipped": (plainly, {"clip_grad_norm": 0.5}),
    "hybrid": (plainly, {"mesh": (2, 2)}),
    "owned": (plainly, {"whole": ["blocks.*.mlp.0.weight"]}),
    "sgd": (scheduled, {"optimizer": torch.optim.SGD}),
    "shapes": (varying, {"stage": 2}),
    "schedule": (scheduled, {"stage": 1}),
    "evaluations": (evaluating, {"stage": 2}),
    "loads": (loading, {"stage": 3}),
    "freezes": (freezing, {"stage": 3}),
    "forgets": (resetting, {"stage": 3}),
    "stores": (storing, {"kind": "drawing", "loss_fn": metrics}),
    "moves": (moving, {"kind": "drawing", "loss_fn": metrics, "stage": 0, "clip_grad_norm": 0.5}),
    "outside": (plainly, {"kind": "drawing", "loss_fn": beside, "outside": True}),
    "draws": (plainly, {"kind": "drawing", "loss_fn": metrics}),
    "attributes": (changing, {"kind": "drawing", "loss_fn": metrics, "stage": 0}),
}


def trained(rank: int, name: str, graphs: bool) -> tuple[list[torch.Tensor], int]:
    """All numbers of some steps, and how many of these were replays."""
    way, options = CASES[name]
    training = Training(rank, graphs, **options)
    kept, replays = list[Any](), 0
    for number in range(STEPS + 2 * (name in ("shapes", "stores"))):
        kept += [way(training, number), training.step.grad_norm]
        replays += graphs and training.step._graphs.replays
    results = tree_leaves(kept)  # held over all steps: whose memory they have been would be seen
    numbers = [*values(training.step.model), *(one.cpu() for one in results if isinstance(one, torch.Tensor))]
    return numbers, replays


def both(rank: int, name: str) -> tuple[list[bool], list[str], int]:
    """Whether all numbers are those without a graph; what is not ordered; how many steps were replays."""
    from tests.simulated.device import checker

    checker.findings.clear()
    with_graphs, replays = trained(rank, name, graphs=True)
    without, _ = trained(rank, name, graphs=False)
    same = [torch.equal(one, other) for one, other in zip(with_graphs, without, strict=True)]
    return same, [str(finding) for finding in checker.findings.values()], replays


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_have_the_bits_of_steps_without_a_graph(gpus: Ranks, name: str) -> None:
    world = 4 if name == "hybrid" else 2
    few = {"shapes": 2, "stores": 3, "moves": 2, "freezes": 2, "forgets": 1, "attributes": 1, "sgd": 0}
    replayed = few | {"schedule": 3, "loads": 3}
    for same, findings, replays in gpus.run(world, both, name, timeout=300):
        assert findings == []
        assert all(same), same
        assert replays == replayed.get(name, STEPS - 3)


def counted(rank: int, stage: int) -> tuple[dict[str, int], int]:
    """The launches of a step, and its calls of Python and torch."""
    from tests.simulated.device import checker, unheard

    training = Training(rank, graphs=True, stage=stage)
    for number in range(4):
        plainly(training, number)
    given, calls = training.given(9), itertools.count()
    checker.begin_step()
    training.step(*given)
    gc.collect()  # otherwise calls of finalizers may be counted
    with unheard():
        sys.setprofile(lambda frame, event, arg: next(calls) if event in ("call", "c_call") else None)
        training.step(*given)
        sys.setprofile(None)
    launches = {name: count for name, count in checker.launches.items() if not name.startswith("captured ")}
    return launches, next(calls)


@pytest.mark.filterwarnings("ignore")
def test_a_step_is_one_launch_and_few_calls(gpus: Ranks) -> None:
    ((launches, calls),) = gpus.run(1, counted, 3, timeout=300)
    assert launches == {"aten::_foreach_copy_": 1, GRAPH: 1, "aten::copy_": 1}
    assert calls <= 400, calls  # 90 of them are guards of torch.compile


WITHOUT = {
    "arenas": True,
    "record": "recording",
    **dict.fromkeys(("offload_activations", "offload_parameters", "offload_optimizer"), "cpu"),
}
"""Options with which a step cannot be captured."""


def refused(rank: int) -> dict[str, str]:
    """What each case says."""
    texts = dict[str, str]()

    def expect(name: str, kind: type[Exception], act: Callable[[], Any]) -> None:
        try:
            act()
        except kind as error:
            texts[name] = str(error)

    def steps(training: Training, count: int = 4) -> None:
        for number in range(count):
            plainly(training, number)

    for name, value in WITHOUT.items():
        expect(name, OptionError, lambda name=name, value=value: Training(rank, True, **{name: value}))  # type: ignore[misc]
    expect("schedule", OptionError, lambda: Training(rank, True, mesh=(1,), names=("pp",)))
    assert not Path("recording").exists(), "a refusal comes before anything is done"
    expect("unknown", OptionError, lambda: zcompile.compile(make("gpt").cuda(), cuda_graphs="all"))  # type: ignore[arg-type]
    expect("adagrad", OptimizerError, lambda: steps(Training(rank, True, optimizer=torch.optim.Adagrad)))
    moving = Training(rank, True, "drawing", loss_fn=lambda model, x, y: metrics(model, x.cuda(), y.cuda()))
    expect("on host", CaptureError, lambda: moving.step(*batch("mlp", rank, 0)))
    hosts = Training(rank, True, "drawing", loss_fn=lambda model, x, y: metrics(model, x, y)[0] * torch.rand(()))
    expect("host draw", CaptureError, lambda: steps(hosts))
    training = Training(rank, True)
    handle = training.optimizer.register_step_post_hook(lambda *_: None)
    expect("hook", OptimizerError, lambda: steps(training))
    handle.remove()
    parameter = next(iter(training.step.model.parameters()))
    gradient_hook = parameter.register_post_accumulate_grad_hook(lambda _: None)
    expect("gradient hook", ParameterError, lambda: steps(training))
    gradient_hook.remove()
    steps(training)  # nothing is left behind
    replacing = Training(rank, True, "drawing", loss_fn=metrics, optimizer=partial(Signs, replaces=True))
    expect("replaces", OptimizerError, lambda: steps(replacing))
    late = Training(rank, True, "drawing", loss_fn=metrics, optimizer=Signs)
    steps(late)
    late.optimizer.param_groups[0]["late"] = True
    expect("late", OptimizerError, lambda: plainly(late, 4))
    late.optimizer.param_groups[0]["late"] = False
    steps(late)
    unscaled = Training(rank, True, dtype=torch.float16, scaled=True)
    expect("scaler", CaptureError, lambda: steps(unscaled))
    full = Training(rank, True)
    steps(full, 2)
    with mock.patch("zcompile.engine.step_graphs.captured", side_effect=torch.OutOfMemoryError("no 2 GiB")):
        expect("memory", CaptureError, lambda: plainly(full, 3))
    steps(full)
    model = Masked().cuda()
    step = zcompile.train_step(
        model, None, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", cuda_graphs="step"
    )
    given = [one.cuda() for one in batch("mlp", rank, 0)]
    for _ in range(2):
        step(*given)
    before = values(step.model)
    expect("waits", CaptureError, lambda: step(*given))
    assert all(torch.equal(one, other) for one, other in zip(before, values(step.model), strict=True))
    return texts


def recomputed(rank: int) -> str:
    """What a step says that draws again what its forward has drawn."""
    model = Dropping().cuda()
    options: dict[str, Any] = {"backend": "eager", "checkpoint": "unit", "cuda_graphs": "step"}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, lambda model, x: model(x).square().mean(), sgd, **options)
    for _ in range(2):
        step(torch.ones(256, device="cuda"))
    with pytest.raises(CaptureError) as raised:
        step(torch.ones(256, device="cuda"))
    return str(raised.value)


@pytest.mark.filterwarnings("ignore")
def test_states_of_random_numbers_are_not_captured(gpus: Ranks) -> None:
    (text,) = gpus.run(1, recomputed, timeout=300)
    assert "at line" in text
    assert "cannot be captured as one CUDA graph: operation not permitted" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_a_graph_cannot_do_is_refused(gpus: Ranks) -> None:
    (texts,) = gpus.run(1, refused, timeout=300)
    for option in (*WITHOUT, "schedule"):
        assert f"'step' captures all of a step, and {option}" in texts[option]
    assert "is unknown" in texts["unknown"]
    assert "changes 'step' in the state of parameter 0 on the host" in texts["adagrad"]
    assert "is on cpu, from where a graph does not read it" in texts["on host"]
    assert "draws random numbers on the host" in texts["host draw"]
    assert "has a step hook" in texts["hook"]
    assert "register_post_accumulate_grad_hook" in texts["gradient hook"]
    assert "puts other tensors into its state" in texts["late"]
    assert "'sums' in the state of parameter 0" in texts["replaces"]
    assert "cannot be captured as one CUDA graph: operation not permitted" in texts["scaler"]
    assert "fewer shapes: each keeps a graph" in texts["memory"]
    assert "cannot be captured as one CUDA graph: operation not permitted" in texts["waits"]
    assert "line" in texts["waits"]


def short_of_memory(rank: int) -> str:
    """What each rank says where the second one has no memory to capture its step."""
    training = Training(rank, True)
    for number in range(2):
        plainly(training, number)
    failing: Any = mock.patch("zcompile.engine.step_graphs.captured", side_effect=torch.OutOfMemoryError("no 2 GiB"))
    with failing if rank else nullcontext(), pytest.raises(ZcompileError) as raised:
        plainly(training, 2)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_cannot_capture_leaves_none_waiting(gpus: Ranks) -> None:
    first, second = gpus.run(2, short_of_memory, timeout=100)
    assert "no 2 GiB" in second
    assert "rank 1" in first


def test_a_graph_needs_a_gpu(without_group: None) -> None:
    model = make("mlp")
    with pytest.raises(OptionError, match="needs a CUDA device"):
        zcompile.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), cuda_graphs="step")


def test_torch_compile_sees_no_whole_step() -> None:
    with pytest.raises(OptionError, match="captures the optimizer"):
        zcompile.backend(cuda_graphs="step")


def test_nothing_is_gathered_for_a_step_of_another_launch() -> None:
    loop, graph = (str(zcompile.pipeline(stage=3, updates=True, cuda_graphs=graphs)) for graphs in (False, "step"))
    assert "gather_ahead" in loop
    assert "gather_ahead" not in graph
    assert "insert_updates" in graph
