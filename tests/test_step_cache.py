"""The cache of steps: what is found there computes what would be traced now, and what is not meant is not found."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import quickly
from tests.models import batch, fit, make, update
from tests.ranks import Ranks, on_ranks
from zcompile.engine import engine
from zcompile.engine.rewritten import CachedStep
from zcompile.errors import OptionError

STEPS = 2


@contextlib.contextmanager
def cached(folder: Path | str) -> Iterator[None]:
    """Within, steps are kept in `folder`."""
    before = {name: os.environ.get(name) for name in ("ZCOMPILE_CACHE", "TORCHINDUCTOR_CACHE_DIR")}
    os.environ.update(ZCOMPILE_CACHE="1", TORCHINDUCTOR_CACHE_DIR=str(folder))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def found(compiled: zcompile.CompiledModule) -> list[bool]:
    """Of each program, whether it was in the cache."""
    return [step.rewritten.is_from_cache for step in compiled._engine.runtime.steps]


class Dropped(nn.Module):
    """Random numbers, a buffer that forward writes to, numbers of its own, and a result that losses may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.dropout(self.norm(self.first(x)), 0.5) * torch.tensor([1.0, 2.0] * 4)
        return self.second(hidden).square().mean(), self.third(hidden).square().mean()


class Recomputed(Dropped):
    """A graph within the graph, which is computed again in the backward."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


OWN = {"dropped": Dropped, "recomputed": Recomputed}


def scalar(results: Any) -> torch.Tensor:
    """The loss among the results of a model."""
    return results if isinstance(results, torch.Tensor) else results[0]  # type: ignore[no-any-return]


def trained(
    model: nn.Module, give: Callable[[int], tuple[Any, ...]], **options: Any
) -> tuple[list[bool], list[str], list[torch.Tensor]]:
    """What was found, the texts of the programs, and losses and state of a model that was trained."""
    torch.compiler.reset()
    compiled = zcompile.compile(model, **{"backend": "eager", **options})
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    torch.manual_seed(3)
    losses = []
    for step in range(STEPS):
        loss = scalar(compiled(*give(step)))
        loss.backward(retain_graph=True)
        update(optimizer)
        losses.append(loss.detach())
    with compiled.no_sync():
        scalar(compiled(*give(STEPS))).backward()
    scalar(compiled(*give(STEPS))).backward()
    optimizer.step()
    with torch.no_grad():
        compiled(*give(STEPS))
    texts = [program.text(regions=True) for program in compiled.programs]
    return found(compiled), texts, [*losses, *compiled.full_state_dict().values()]


def thrice(rank: int, folder: str, kind: str, options: dict[str, Any]) -> None:
    """Without a cache, with an empty one, and with what that left there."""
    options = {key: f"disk:{folder}" if value == "disk:FOLDER" else value for key, value in options.items()}

    def once() -> tuple[list[bool], list[str], list[torch.Tensor]]:
        if kind in OWN:
            torch.manual_seed(0)
            return trained(OWN[kind](), lambda step: (torch.randn(4, 6) + step,), **options)
        return trained(make(kind), lambda step: batch(kind, rank, step), **options)

    plain = once()
    with cached(folder):
        torch.distributed.barrier()
        cold = once()
        torch.distributed.barrier()
        warm = once()
    assert not any(plain[0])
    if options.get("prefetch") != "auto":  # measured anew: passes run again on what was traced
        assert all(warm[0])
        assert plain[1] == cold[1] == warm[1]
    for results in (cold[2], warm[2]):
        for value, expected in zip(results, plain[2], strict=True):
            assert torch.equal(value, expected)


PRODUCT = itertools.product(
    ["tied", "mlp", "conv", "dropped"],
    [0, 1, 2, 3],
    [1, 2, 3],
    [("prefetch", 2), ("prefetch", "auto"), ("bucket", 1024), ("memory_limit", "1 GiB")],
)


@quickly("kind, stage, world, option", list(PRODUCT), [("mlp", 3, 2, ("prefetch", 2))], pairs=False)
def test_what_is_found_trains_with_the_same_bits(
    kind: str, stage: int, world: int, option: tuple[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(world, thrice, str(tmp_path), kind, dict([("stage", stage), option]))


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"checkpoint": "unit"}),
    ("mlp", {"arenas": True}),
    ("gpt", {"offload_activations": "disk:FOLDER"}),
    ("mlp", {"dtype": torch.bfloat16}),
]


@pytest.mark.slow
@quickly("kind, options", [*ASKED, ("gpt", {"arenas": True}), ("gpt", {"dtype": torch.bfloat16})], ASKED[1:3], slow=())
def test_what_is_found_does_what_options_ask_for(
    kind: str, options: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(2, thrice, str(tmp_path), kind, options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_graphs_within_graphs_are_found(backend: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, thrice, str(tmp_path), "recomputed", {"backend": backend, "stage": 1})


@pytest.mark.slow
def test_what_is_found_has_its_regions_compiled_by_inductor(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, thrice, str(tmp_path), "mlp", {"backend": "inductor"})


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def one(ranks: Ranks, tmp_path: Path) -> Callable[..., Any]:
    """Runs a function of a folder on one rank."""

    def run(function: Callable[..., Any], *args: Any, world: int = 1) -> Any:
        return ranks.run(world, function, str(tmp_path), *args)[0]

    return run


def mlp(**options: Any) -> list[bool]:
    return trained(make("mlp"), lambda step: batch("mlp", 0, step), **options)[0]


def other_options(rank: int, folder: str) -> None:
    with cached(folder):
        assert mlp() == [False, False], "nothing is there"
        assert mlp() == [True, True]
        others: list[dict[str, Any]] = [
            {"stage": 2},
            {"prefetch": 1},
            {"dtype": torch.bfloat16},
            {"backend": "inductor"},
            {"units": lambda path, module: path == "layers.1"},
        ]
        for options in others:
            assert not any(mlp(**options)), options
            assert all(mlp(**options)), options
        frozen = make("mlp")
        frozen.layers[0].requires_grad_(False)  # type: ignore[index,union-attr]
        assert not any(trained(frozen, lambda step: batch("mlp", 0, step))[0])
        with patch.object(engine, "own_source", lambda: "another version"):
            assert not any(mlp())
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert not any(mlp()), "torch's own key says nothing of it"
        assert mlp() == [True, True]


@pytest.mark.slow
def test_other_options_weights_and_versions_find_nothing(one: Callable[..., Any]) -> None:
    one(other_options)


def renamed(rank: int, folder: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = make("mlp")
            self.blocks, self.factor = inner.layers, inner.scale

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for layer in self.blocks[:-1]:  # type: ignore[index,union-attr]
                x = torch.tanh(layer(x))
            return F.mse_loss(self.factor * self.blocks[-1](x), y)  # type: ignore[index,operator]

    with cached(folder):
        mlp()
        torch.manual_seed(0)
        has, texts, _ = trained(Other(), lambda step: batch("mlp", 0, step))
    assert not any(has)
    assert "blocks" in texts[0]


@pytest.mark.slow
def test_a_model_of_other_names_finds_nothing(one: Callable[..., Any]) -> None:
    one(renamed)


def own_operator(rank: int, folder: str) -> None:
    factor = 2.0

    @torch.library.custom_op("zcompile_step_cache::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    scaled.register_fake(torch.empty_like)
    scaled.register_autograd(lambda ctx, grad: grad * factor)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(scaled(self.layer(x)), y)

    def gradient() -> torch.Tensor:
        torch.compiler.reset()
        torch.manual_seed(0)
        compiled = zcompile.compile(Scaled(), backend="eager")
        compiled(*batch("mlp", 0, 0)).backward()
        assert found(compiled) == [False]
        grad = compiled.layer.weight.grad  # type: ignore[union-attr]
        return grad.full_tensor()  # type: ignore[no-any-return,operator,union-attr]

    with cached(folder):
        before = gradient()
        factor = 3.0
        assert not torch.allclose(gradient(), before)


@pytest.mark.slow
def test_an_operator_of_the_users_own_may_change(one: Callable[..., Any]) -> None:
    one(own_operator)


class Writes(nn.Module):
    """Writes to one of its inputs, which may lie in the memory of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.layer(x + y).square().mean()


def shared(rank: int, folder: str) -> None:
    def losses(start: int) -> tuple[float, float]:
        torch.compiler.reset()
        torch.manual_seed(0)
        plain = Writes()
        compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
        values = []
        for model in (plain, compiled):
            memory = torch.linspace(0, 1, 36).view(6, 6)
            values.append(model(memory[:3], memory[start : start + 3]).item())
        return values[0], values[1]

    with cached(folder):
        for start in (3, 1, 0, 3):
            assert losses(start)[0] == losses(start)[1], start


@pytest.mark.slow
def test_inputs_that_share_memory_are_no_others(one: Callable[..., Any]) -> None:
    one(shared)


class Scaled(torch.Tensor):
    """A tensor class of the user's own, whose code changes."""

    factor = 2.0

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Scaled:
        return Scaled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.inner * Scaled.factor if isinstance(one, Scaled) else one for one in args]
        return func(*plain, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return "Scaled"  # torch 2.11 prints what it traces, and would compute for it


def of_a_subclass(rank: int, folder: str) -> None:
    def loss() -> tuple[float, bool]:
        torch.compiler.reset()
        torch.manual_seed(0)
        compiled = zcompile.compile(nn.Linear(6, 2), backend="eager")
        return compiled(Scaled(torch.ones(3, 6))).square().mean().item(), any(found(compiled))

    with cached(folder):
        before = loss()
        Scaled.factor = 3.0
        after = loss()
        Scaled.factor = 2.0
    assert not after[1]
    assert after[0] != before[0]


def test_a_tensor_class_of_the_users_own_may_change(one: Callable[..., Any]) -> None:
    one(of_a_subclass)


class Halves(nn.Module):
    """The same operations in the same order, those between the layers inside of blocks or outside of them."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half(inside=inside) for _ in range(3))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.inside else block(x).sin().tanh()
        return x.square().mean()


class Half(nn.Module):
    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin().tanh() if self.inside else self.layer(x)


def moved(rank: int, folder: str) -> None:
    with cached(folder):
        for inside in (True, False):
            assert not any(trained(Halves(inside=inside), lambda step: (torch.ones(2, 6),))[0])


@pytest.mark.slow
def test_operations_that_move_to_another_module_find_nothing(one: Callable[..., Any]) -> None:
    """What units compute again depends on it, and what texts say."""
    one(moved)


def refused(rank: int, folder: str) -> None:
    with cached(folder):
        mlp()
        error = OptionError("memory_limit", "is not met", "raise it")
        with patch.object(CachedStep, "read", side_effect=error), pytest.raises(OptionError, match="is not met"):
            mlp()


@pytest.mark.slow
def test_an_error_of_a_step_that_was_found_is_final(one: Callable[..., Any]) -> None:
    """torch takes errors for damaged entries, and traces; other ranks have been told by then."""
    one(refused)


def never_kept(rank: int, folder: str) -> None:
    def dump() -> dict[str, Any]:
        return {"dump": f"{folder}/dump"}

    with cached(folder):
        mlp()
        assert not any(mlp(**dump()))
        assert Path(folder, "dump", "program_0").is_dir()
        assert not any(mlp(passes={"pack_small": None}))
        os.environ["ZCOMPILE_CACHE"] = "0"
        assert not any(mlp())


@pytest.mark.slow
def test_dumps_and_own_passes_are_made_each_time(one: Callable[..., Any]) -> None:
    one(never_kept)


def varying(rank: int, folder: str, kind: str, backend: str) -> None:
    def losses(sizes: tuple[int, ...]) -> list[bool]:
        torch.compiler.reset()
        plain = make(kind)
        compiled = zcompile.compile(make(kind), backend=backend)
        for size in sizes:
            expected, loss = plain(*batch(kind, 0, size, size)), compiled(*batch(kind, 0, size, size))
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
            expected.backward()
            loss.backward()
        for parameter, wanted in zip(compiled.parameters(), plain.parameters(), strict=True):
            grad = parameter.grad.full_tensor()  # type: ignore[union-attr,operator]
            torch.testing.assert_close(grad, wanted.grad, rtol=1e-4, atol=1e-6)
        compiled.dump(f"{folder}/dump_{sizes[1]}")
        return found(compiled)

    with cached(folder):
        assert losses((4, 5, 9, 4)) == [False, False]
        assert losses((4, 5, 9, 4)) == [True, True]
        assert losses((4, 7, 2, 12)) == [True, True], "other sizes that vary alike"
        assert losses((6, 3, 8)) == [False, True], "the first is of one size"


@pytest.mark.slow
@quickly(
    "kind, backend",
    [(kind, backend) for kind in ("tied", "mlp", "conv") for backend in ("eager", "inductor")],
    [("tied", "eager")],
    slow=(),
)
def test_sizes_may_vary(one: Callable[..., Any], kind: str, backend: str) -> None:
    one(varying, kind, backend)


def damaged(rank: int, folder: str, content: bytes) -> None:
    with cached(folder):
        mlp()
        entries = [path for path in Path(folder, "aotautograd").rglob("*") if path.is_file()]
        assert len(entries) == 2
        for path in entries:
            whole = path.read_bytes()
            path.write_bytes(content or whole[: len(whole) // 2])
        assert not any(mlp())


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_damaged_entry_is_passed_over(one: Callable[..., Any], content: bytes) -> None:
    one(damaged, content)


def reported(rank: int, folder: str) -> None:
    def report(name: str) -> tuple[list[str], str, list[bool]]:
        torch.compiler.reset()
        compiled = zcompile.compile(make("gpt"), backend="eager")
        compiled(*batch("gpt", 0, 0)).backward()
        compiled.dump(f"{folder}/{name}")
        (journal,) = compiled.journals
        assert [entry.before for entry in journal.entries[1:]] == [entry.after for entry in journal.entries[:-1]]
        assert journal.entries[-1].after.text() == compiled._engine.runtime.steps[0].program.text()
        texts = [f"{entry.name}\n{entry.after.text(regions=True)}" for entry in journal.entries]
        return [journal.entries[0].before.text(), *texts], compiled.explain(), found(compiled)

    with cached(folder):
        cold, warm = report("cold"), report("warm")
    assert warm[2] == [True]
    assert cold[0] == warm[0]
    assert "1 of 1 programs from torch's cache" in warm[1]
    assert "torch's cache" not in cold[1]
    files = {path.relative_to(f"{folder}/cold") for path in Path(folder, "cold").rglob("*.py")}
    assert files
    for file in files:
        assert Path(folder, "cold", file).read_text() == Path(folder, "warm", file).read_text()


@pytest.mark.slow
def test_reports_show_what_passes_do_to_a_program_that_was_found(one: Callable[..., Any]) -> None:
    one(reported)


def held_back(rank: int, folder: str) -> None:
    def gradients() -> list[torch.Tensor]:
        torch.compiler.reset()
        compiled = zcompile.compile(make("mlp"), stage=1, backend="eager")
        with compiled.no_sync():
            compiled(*batch("mlp", rank, 0)).backward()
        compiled(*batch("mlp", rank, 1)).backward()
        states.append(found(compiled))
        return [parameter.grad.full_tensor() for parameter in compiled.parameters()]  # type: ignore[union-attr,operator]

    states: list[list[bool]] = []
    with cached(folder):
        cold = gradients()
        torch.distributed.barrier()
        warm = gradients()
    assert states[1] == [True]
    for one, other in zip(cold, warm, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_gradients_are_held_back_by_a_program_that_was_found(one: Callable[..., Any]) -> None:
    one(held_back, world=2)


def train_steps(rank: int, folder: str) -> None:
    def losses() -> tuple[list[float], list[bool]]:
        torch.compiler.reset()
        model = zcompile.compile(make("mlp"), backend="eager")
        step = zcompile.train_step(model, None, torch.optim.AdamW(model.parameters()))
        return [float(step(*batch("mlp", rank, number))) for number in range(3)], found(model)

    with cached(f"{folder}/{rank}"):  # or it may find what the other rank has kept
        cold = losses()
        torch.distributed.barrier()
        warm = losses()
    assert cold[0] == warm[0]
    assert (cold[1], warm[1]) == ([False], [True])


@pytest.mark.slow
def test_train_steps_are_kept(one: Callable[..., Any]) -> None:
    one(train_steps, world=2)


def of_torch_compile(rank: int, folder: str) -> None:
    def losses() -> tuple[list[float], list[bool]]:
        torch.compiler.reset()
        backend = zcompile.backend(stage=3)
        model = make("mlp")
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        values = [loss.item() for loss in fit(compiled, optimizer, (batch("mlp", rank, n) for n in range(3)))]
        return values, [step.rewritten.is_from_cache for step in backend.engine.runtime.steps]

    with cached(f"{folder}/{rank}"):
        cold = losses()
        torch.distributed.barrier()
        warm = losses()
    assert cold[0] == warm[0]
    assert (cold[1], warm[1]) == ([False], [True])


@pytest.mark.slow
def test_the_backend_of_torch_compile_finds_its_steps(one: Callable[..., Any]) -> None:
    one(of_torch_compile, world=2)


# -- ranks that find different things ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefetch": "auto"}, {"memory_limit": "1 GiB"}])
@quickly("kind", ["mlp", "gpt"], ["mlp"], slow=())
@on_ranks(3)
def test_ranks_that_find_nothing_train_beside_one_that_does(
    rank: int, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:

    def once() -> tuple[list[bool], list[torch.Tensor]]:
        has, _, values = trained(make(kind), lambda step: batch(kind, rank, step), **options)
        return has, values

    with cached(f"{tmp_path}/of_{rank}"):
        cold = once()
    # A folder each: of two ranks that share one, the later finds what the other has just written.
    with cached(f"{tmp_path}/of_{rank}" if rank == 0 else f"{tmp_path}/empty_{rank}"):
        torch.distributed.barrier()
        mixed = once()
    assert not any(cold[0])
    assert options.get("prefetch") == "auto" or mixed[0] == [rank == 0] * 2
    for one, other in zip(cold[1], mixed[1], strict=True):
        assert torch.equal(one, other)


def fills(rank: int, folder: str) -> list[bool]:
    with cached(folder):
        return trained(make("mlp"), lambda step: batch("mlp", 0, step), stage=3)[0]


@pytest.mark.slow
def test_what_one_rank_has_kept_another_finds(ranks: Ranks, tmp_path: Path) -> None:
    """The ranks of one run after another find what either has written: an entry knows nothing of its rank."""
    found = ranks.run(2, fills, str(tmp_path))
    assert all(not all(some) for some in zip(*found, strict=True)), "who is late finds what the other has just written"
    folders = list(Path(tmp_path, "aotautograd").iterdir())
    assert len(folders) == 2, "one for each program, not for each rank"
    assert ranks.run(2, fills, str(tmp_path)) == [[True] * 2] * 2


# -- processes --------------------------------------------------------------------------------------------------------

SCRIPT = """
    import torch
    import torch.distributed as dist

    import zcompile
    from tests.models import batch, make

    dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
    compiled = zcompile.compile(make("gpt"), backend="eager")
    loss = compiled(*batch("gpt", 0, 0))
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in compiled.parameters()])
    print(loss.item().hex(), float(norm).hex(), compiled.explain().count("from torch's cache"))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_another_process_finds_the_step(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ZCOMPILE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    }
    said = []
    for number in range(2):
        script = textwrap.dedent(SCRIPT).format(store=tmp_path / f"store{number}")
        made = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        said.append(made.stdout.split())
    assert said[0][:2] == said[1][:2]
    assert [line[2] for line in said] == ["0", "1"]
