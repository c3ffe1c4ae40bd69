"""Modules and methods of a compiled model that are called past it, and full parameters for a while."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import diagonal, quickly
from tests.compare import full
from tests.models import GPT, batch, update
from tests.ranks import AT_ONCE, Ranks, on_ranks
from tests.refusals import typed_error_of
from zcompile.torch_internals.distributed import default_store

Call = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Coder(nn.Module):
    """An encoder and heads that are called in all kinds of ways, with a parameter of its own that methods read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(6, 6) for _ in range(3))})
        self.head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 11))
        self.shift = nn.Parameter(torch.full((6,), 0.1))
        self.scales = nn.ParameterList(torch.full((6,), 1.0 + number) for number in range(2))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self._shifted(self.embedding(x))
        for layer in self.body["layers"]:
            hidden = torch.tanh(layer(hidden))
        return hidden

    def _shifted(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.shift

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Reads a list of parameters, and nothing else of its own."""
        return hidden * self.scales[0] + self.scales[1]

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def by_methods(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(model.encode(x)).flatten(0, 1), y.flatten())


def in_chunks(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = model.encode(x)
    parts = zip(hidden.chunk(2, 1), y.chunk(2, 1), strict=True)
    return torch.stack([F.cross_entropy(model.head(h).flatten(0, 1), t.flatten()) for h, t in parts]).mean()


def by_modules(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = model.embedding(x)
    for layer in model.body.layers if hasattr(model.body, "layers") else model.body["layers"]:
        hidden = torch.tanh(layer(hidden))
    return F.cross_entropy(model.head[2](model.head[1](model.head[0](hidden))).flatten(0, 1), y.flatten())


def in_turns(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) + model.scaled(model.embedding(x)).square().mean()
    return whole + by_methods(model, x, y) + model.head(model.embedding(y)).square().mean()


CALLS: dict[str, Call] = {
    "methods": by_methods,
    "chunks": in_chunks,
    "modules": by_modules,
    "turns": in_turns,
}


def tokens(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 11, (2, 4), generator=source), torch.randint(0, 11, (2, 4), generator=source)


def made() -> Coder:
    torch.manual_seed(0)
    return Coder()


def references(call: Call, world: int, steps: int) -> Iterator[Coder]:
    """Plain PyTorch after each step, with the mean of the gradients that the batches of all ranks give."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        grads: list[list[torch.Tensor]] = []
        for rank in range(world):
            model.zero_grad()
            call(model, *tokens(rank, step)).backward()
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        for parameter, *of_ranks in zip(model.parameters(), *grads, strict=True):
            parameter.grad = torch.stack(of_ranks).mean(0)
        optimizer.step()
        yield model


@quickly(
    "stage, way, world, first",
    [(stage, way, world, first) for stage in range(4) for way in CALLS for world in (2, 3) for first in (False, True)],
    [(0, "methods", 2, True)],
    pairs=False,
)
@on_ranks()
def test_calls_of_modules_and_methods_are_trained_through(
    rank: int, stage: int, way: str, world: int, first: bool
) -> list[str]:
    """What is not as in plain PyTorch; `first`: the whole model is evaluated before."""
    call, compiled = CALLS[way], zcompile.compile(made(), stage=stage, backend="eager")
    optimizer, wrong = torch.optim.SGD(compiled.parameters(), lr=0.1), list[str]()
    if first:
        with torch.no_grad():
            compiled(tokens(rank, 0)[0])
    for step, reference in enumerate(references(call, world, 3)):
        x, y = tokens(rank, step)
        loss = call(compiled, x, y)
        loss.backward()
        update(optimizer)
        for name, parameter in compiled.named_parameters():
            theirs = reference.get_parameter(name)
            if not torch.allclose(full(parameter), theirs, rtol=1e-5, atol=1e-6):
                wrong.append(f"step {step}: {name} {(full(parameter) - theirs).abs().max()}")
        if not torch.equal(compiled.chosen(x), reference.chosen(x)):
            wrong.append(f"step {step}: what is chosen")
    return wrong


def alone(**options: Any) -> tuple[Coder, zcompile.CompiledModule]:
    plain = made()
    return plain, zcompile.compile(copy.deepcopy(plain), backend="eager", **options)


@pytest.mark.slow
def test_modules_and_methods_give_what_the_plain_ones_give() -> None:
    plain, compiled = alone()
    x, _ = tokens(0, 0)
    for call in (
        lambda m: m.encode(x),
        lambda m: m.head(m.encode(x)),
        lambda m: m._shifted(torch.ones(6)),
        lambda m: m.scaled(torch.ones(6)),
        lambda m: m.chosen(x),
        lambda m: m.body["layers"][1](torch.ones(2, 6)),
        lambda m: torch.tensor(m.count()),
    ):
        assert torch.equal(call(compiled), call(plain))


@pytest.mark.slow
def test_the_model_that_was_given_is_called_as_the_compiled_one() -> None:
    plain, model = made(), made()
    compiled = zcompile.compile(model, backend="eager")
    x, _ = tokens(0, 0)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.head(model.encode(x)), plain(x))
    seen = list[str]()
    model.register_forward_hook(lambda *_: seen.append("hook"))
    assert torch.equal(model(x), compiled(x))
    assert seen == ["hook", "hook"]


def test_the_compiled_model_has_the_signature_of_its_own() -> None:
    plain, compiled = alone()
    assert inspect.signature(compiled.forward) == inspect.signature(plain.forward)
    assert list(inspect.signature(compiled.encode).parameters) == ["x"]


def test_modules_of_a_compiled_model_are_not_copied_or_pickled() -> None:
    _, compiled = alone()
    with pytest.raises(zcompile.ModelError, match="Linear: is a module of a compiled model, and cannot be copied"):
        copy.deepcopy(compiled.head)
    with pytest.raises(zcompile.ModelError, match="cannot be pickled"):
        pickle.dumps(compiled.head)


def test_the_model_that_was_given_can_be_trained_alone() -> None:
    plain, model = made(), made()
    zcompile.compile(model, stage=1, backend="eager")
    for either in (plain, model):
        optimizer = torch.optim.SGD(either.parameters(), lr=0.1)
        for step in range(3):
            gc.collect()
            F.cross_entropy(either(tokens(0, step)[0]).flatten(0, 1), tokens(0, step)[1].flatten()).backward()
            update(optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), plain.get_parameter(name)), name


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(16, 64), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(x))

    def extra_repr(self) -> str:
        return "dropping"


@torch.compiler.disable
def untraced() -> None:
    """Breaks the graph."""


def recomputed(rank: int, options: dict[str, Any], inside: bool) -> tuple[bool, list[bool]]:
    """Whether gradients are those of the masks of the forward, for a module that is checkpointed; and its mask."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Dropping()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            untraced()
            result: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
            return result

    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    compiled: Any = zcompile.compile(Holder(), backend="eager", **options)
    x = torch.randn(4, 16, requires_grad=True)
    result = compiled(x) if inside else checkpoint(compiled.block, x, use_reentrant=False)
    result.float().sum().backward()
    mask = (result != 0).float()
    expected = mask * 2 @ full(compiled.block.inner.weight).detach()
    assert x.grad is not None
    return torch.allclose(x.grad, expected, atol=0.2 if options else 1e-5), mask.flatten().bool().tolist()


@diagonal("options, inside", [{}, {"dtype": torch.bfloat16}], [False, True])
def test_a_recomputation_draws_what_its_call_drew(ranks: Ranks, options: dict[str, Any], inside: bool) -> None:
    (right, mask), (also, other) = ranks.run(2, recomputed, options, inside)
    assert (right, also) == (True, True)
    assert mask != other


def test_printing_is_no_call() -> None:
    compiled = zcompile.compile(nn.Sequential(Dropping(), nn.LayerNorm(64)), backend="eager")
    before = compiled.traffic.messages
    assert "dropping" in repr(compiled)
    assert compiled.traffic.messages == before


def test_a_wrapper_of_forward_that_was_put_on_later_is_traced() -> None:
    plain, compiled = alone()
    inner = compiled.head[0].forward
    compiled.head[0].forward = lambda x: inner(x) * 2
    x, _ = tokens(0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no graph break
        hidden = plain.head[0](plain.encode(x)) * 2
        assert torch.equal(compiled(x), plain.head[2](plain.head[1](hidden)))
    compiled.head[0].forward = inner
    assert torch.equal(compiled.head[0](torch.ones(6)), plain.head[0](torch.ones(6)))


# -- unsharded --------------------------------------------------------------------------------------------------------


@quickly(
    "stage, options",
    [(stage, options) for stage in range(4) for options in ({}, {"dtype": torch.bfloat16})],
    [(0, {})],
    pairs=False,
)
@on_ranks(2)
def test_full_parameters_are_those_of_the_plain_model_and_nothing_is_sent(
    rank: int, stage: int, options: dict[str, Any]
) -> None:
    plain, equal, sent = made(), list[bool](), 0
    compiled = zcompile.compile(made(), stage=stage, backend="eager", **options)
    optimizer, reference = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (compiled, plain))
    for step in range(2):
        x, y = tokens(0, step)
        with torch.no_grad():
            wanted = compiled(x)
            equal.append(bool(options) or torch.equal(wanted, plain(x)))
            with compiled.unsharded():
                before = compiled.traffic.bytes
                equal += [torch.equal(compiled(x), wanted) for _ in range(1 + 2 * rank)]  # as often as each likes
                equal.append(torch.equal(compiled.chosen(x), wanted.argmax(-1)))
                if not options:
                    equal += [torch.equal(v, plain.state_dict()[n]) for n, v in compiled.state_dict().items()]
                sent += compiled.traffic.bytes - before
        for either, stepper in ((compiled, optimizer), (plain, reference)):
            by_methods(either, x, y).backward()
            update(stepper)
    assert all(equal), equal
    assert sent == 0


@pytest.mark.slow
@on_ranks(2)
def test_mistakes_within_unsharded_are_typed_errors(rank: int, tmp_path: Path) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, by_methods, optimizer, backend="eager")
    compiled, found = step.model, {}
    compiled(tokens(rank, 0)[0]).sum().backward()
    with compiled.unsharded():
        found["step"] = typed_error_of(optimizer.step)
        found["train step"] = typed_error_of(lambda: step(*tokens(rank, 0)))
        found["save"] = typed_error_of(lambda: compiled.save_checkpoint(tmp_path / "x", optimizer))
        found["load"] = typed_error_of(lambda: compiled.load_state_dict({}))
        found["nested"] = typed_error_of(lambda: compiled.unsharded().__enter__())

    def written(write: Callable[[], object]) -> str:
        def act() -> None:
            with compiled.unsharded(), torch.no_grad():
                write()

        return typed_error_of(act)

    found["write"] = written(lambda: compiled.shift.add_(1))
    found["write to data"] = written(lambda: compiled.shift.data.add_(1))
    found["assign data"] = written(lambda: setattr(compiled.shift, "data", torch.ones(6)))
    found["reshape data"] = written(lambda: setattr(compiled.shift, "data", torch.ones(3)))
    found["replace"] = written(lambda: setattr(compiled.module, "shift", nn.Parameter(torch.ones(6))))
    found["convert"] = written(lambda: compiled.module.half())
    found["convert to the same"] = written(lambda: compiled.module.head.float().to("cpu"))
    copies = list[nn.Module]()
    found["copy"] = written(lambda: copies.append(copy.deepcopy(compiled.module.head)))
    found["of a copy"] = str({type(parameter) for parameter in copies[0].float().parameters()} == {nn.Parameter})
    found["after"] = str(float(full(compiled.shift)[0].detach()))
    small = zcompile.compile(made(), backend="eager", memory_limit=1000)
    found["limit"] = typed_error_of(lambda: small.unsharded().__enter__())
    found["still"] = str(tuple(compiled.encode(tokens(rank, 0)[0]).shape))
    assert found["step"].startswith("OptimizerError: SGD: steps within unsharded()")
    assert found["train step"].startswith("OptionError: unsharded(): is for evaluation")
    assert found["save"].startswith("StateError: Coder: is within unsharded()")
    assert found["load"].startswith("StateError: Coder: is within unsharded()")
    assert found["nested"].startswith("OptionError: unsharded(): is within another one")
    assert found["write"].startswith("ParameterError: shift: was written to within unsharded()")
    assert found["write to data"].startswith("ParameterError: shift: was written to within unsharded()")
    assert found["assign data"].startswith("ParameterError: shift: was written to within unsharded()")
    assert found["reshape data"].startswith("ParameterError: shift: has shape [6], and its .data would have [3]")
    assert found["replace"].startswith("ParameterError: shift: was replaced or removed while it is full")
    assert found["convert"] == found["convert to the same"] == found["copy"] == ""
    assert found["of a copy"] == "True"
    assert found["after"] == str(float(torch.tensor(0.1)))
    assert found["limit"].startswith("OptionError: memory_limit: 1000 B is less than the")
    assert found["still"] == "(2, 4, 6)"


def written_by_one(rank: int) -> tuple[str, float]:
    compiled = zcompile.compile(made(), backend="eager")
    compiled(tokens(rank, 0)[0])

    def act() -> None:
        with compiled.unsharded(), torch.no_grad():
            if rank == 0:
                compiled.shift.data = torch.ones(6)
        compiled(tokens(rank, 0)[0])

    started = time.perf_counter()
    return typed_error_of(act), time.perf_counter() - started


@pytest.mark.slow
def test_a_write_of_one_rank_within_unsharded_is_told_to_the_others(ranks: Ranks) -> None:
    (written, _), (told, seconds) = ranks.run(2, written_by_one)
    assert written.startswith("ParameterError: shift: was written to within unsharded()")
    assert told.startswith("AgreementError: unsharded(): rank 0 failed there: ParameterError: shift: was written to")
    assert seconds < AT_ONCE


def fails_alone(rank: int, act: str) -> tuple[str, float]:
    """Rank 1 alone is refused, and stays: it does not go on, nor does its process end, until rank 0 has."""
    compiled = zcompile.compile(made(), backend="eager")
    optimizer, store = torch.optim.SGD(compiled.parameters(), lr=0.1), default_store()

    def attempt() -> None:
        with compiled.unsharded(), torch.no_grad():
            if rank and act == "unsharded":
                compiled.shift.add_(1)
        if rank and act == "call":
            compiled.module._parameters["shift"] = nn.Parameter(torch.ones(6))
        loss = compiled(tokens(rank, 0)[0]).sum()
        loss.backward()
        optimizer.step()
        compiled(tokens(rank, 0)[0])

    compiled(tokens(rank, 0)[0]).sum().backward()
    start = time.perf_counter()
    said = typed_error_of(attempt)
    if rank:
        store.wait(["rank 0 has ended"], timedelta(seconds=50))
    else:
        store.set("rank 0 has ended", "")
    return said, time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.parametrize("act", ["unsharded", "call"])
def test_others_are_told_of_what_one_rank_alone_is_refused(ranks: Ranks, act: str) -> None:
    (said, seconds), (own, _) = ranks.run(2, fails_alone, act, group=60)
    assert own.startswith("ParameterError: shift: was ")
    what = {"unsharded": "unsharded()", "call": "a call of the model"}[act]
    assert said.startswith(f"AgreementError: {what}: rank 1 failed there: ParameterError: shift: was ")
    assert seconds < AT_ONCE


class Outer(nn.Module):
    """Plain Python, as it breaks the graph, around a module that is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x) if x.sum() < 1e9 else x)


@pytest.mark.parametrize("split", [False, True])
def test_a_traceback_has_few_lines_that_are_not_the_users(split: bool) -> None:
    warnings.simplefilter("ignore")
    model = Outer() if split else made()
    compiled = zcompile.compile(model, backend="eager")
    given = torch.randn(2, 6) if split else tokens(0, 0)[0]
    compiled(given)
    (model.inner if split else model.head[0])._parameters["weight"] = nn.Parameter(torch.ones(6, 6))  # type: ignore[index]
    with pytest.raises(zcompile.ParameterError) as caught:
        compiled(given)
    modules = [entry.frame.f_globals.get("__name__", "") for entry in caught.traceback]
    assert sum(name.startswith("zcompile") for name in modules) <= 3
    assert sum(name.startswith("torch") for name in modules) <= 3
    assert ("forward" in [entry.name for entry in caught.traceback if entry.frame.f_globals is globals()]) is split


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model, _: model.load_full_state_dict({"head.0.weight": torch.ones(1)}),
        lambda model, _: model.save_checkpoint("/dev/null/there"),
        lambda *_: zcompile.compile(made(), stage=7),
        lambda _, step: step(torch.ones(2, 6), torch.ones(1)),
    ],
)
def test_other_calls_have_short_tracebacks_too(wrong: Callable[[Any, Any], Any]) -> None:
    model = zcompile.compile(made(), backend="eager")
    step = zcompile.train_step(model, lambda m, *given: given[0], torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(zcompile.ZcompileError) as caught:
        wrong(model, step)
    modules = [entry.frame.f_globals.get("__name__", "") for entry in caught.traceback]
    assert sum(name.startswith(("zcompile", "torch")) for name in modules) <= 2, modules


def divided(rank: int) -> bool:
    torch.manual_seed(0)
    plain, mesh = GPT(layers=2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(plain)
    plan = {f"blocks.{i}.mlp.0": ColwiseParallel() for i in range(2)}
    parallelize_module(model, mesh["tp"], plan | {f"blocks.{i}.mlp.2": RowwiseParallel() for i in range(2)})
    compiled = zcompile.compile(model, mesh=mesh["dp"], backend="eager")
    x, _ = batch("gpt", 0, 0)
    with compiled.unsharded(), torch.no_grad():
        return torch.allclose(compiled(x), plain(x), atol=1e-5)


def test_tensor_parallel_models_have_full_parameters_of_their_part(ranks: Ranks) -> None:
    assert ranks.run(4, divided) == [True] * 4


# -- generation -------------------------------------------------------------------------------------------------------


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0)
    config.eos_token_id, config.pad_token_id = None, 0
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.slow
@quickly("stage", range(4), [3])
@on_ranks(2)
def test_text_is_generated_as_by_the_plain_model(rank: int, stage: int) -> None:
    warnings.simplefilter("ignore")
    plain, model = gpt2(), gpt2()
    compiled = zcompile.compile(model, stage=stage, backend="eager")
    prompt, found = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(rank)), []

    def text(either: Any, length: int) -> torch.Tensor:
        generated: torch.Tensor = either.generate(prompt, max_new_tokens=length, do_sample=False)
        return generated

    found.append(torch.equal(text(compiled, 3), text(plain, 3)))
    with compiled.unsharded():
        found.append(torch.equal(text(compiled, 4 + 9 * rank), text(plain, 4 + 9 * rank)))
    found.append(torch.equal(text(compiled, 3), text(plain, 3)))
    assert found == [True] * 3


def exports(rank: int, folder: Path) -> bool:
    transformers = pytest.importorskip("transformers")
    compiled = zcompile.compile(gpt2(), backend="eager")
    with compiled.unsharded():
        if rank == 0:
            compiled.save_pretrained(folder / "first")
    whole = compiled.full_state_dict()
    if rank > 0:
        return True
    compiled.save_pretrained(folder / "whole", state_dict=whole)
    loaded = [transformers.GPT2LMHeadModel.from_pretrained(folder / name).state_dict() for name in ("first", "whole")]
    wanted = gpt2().state_dict()
    return all(torch.equal(one[name], value) for one in loaded for name, value in wanted.items())


@pytest.mark.slow
def test_hugging_face_saves_what_the_plain_model_loads(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, exports, tmp_path) == [True, True]
