"""Owners: matrices that one rank each keeps whole, for optimizers that need them whole."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from tests import hybrids
from tests.cases import quickly
from tests.compare import differing, parameters
from tests.dumps import assert_proven_and_replayed
from tests.hybrids import STEPS, Shape, Values, one_process
from tests.models import batch, make, update
from tests.ranks import Ranks, on_ranks, on_threads
from tests.threads import Threads
from zcompile import OptimizerError, OptionError, ParameterError


class Whitening(torch.optim.Optimizer):
    """Shampoo of order two (Gupta et al., ICML 2018). Its state has other shapes than the parameter, or none, and it
    counts steps in its groups, as those of the package pytorch-optimizer do.
    """

    def __init__(self, params: Sequence[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["left"] = 1e-3 * torch.eye(param.shape[0])
                    state["both"] = [1e-3 * torch.eye(param.shape[1]), torch.zeros_like(param)]
                    state["count"] = 0
                state["count"] += 1
                right, mean_ = state["both"]
                mean_.lerp_(param.grad, 0.5)
                state["left"].add_(param.grad @ param.grad.T)
                right.add_(param.grad.T @ param.grad)
                left, right = (inverse_root(one) for one in (state["left"], right))
                param.add_(left @ mean_ @ right.T, alpha=-group["lr"] / (state["count"] + group["step"]))


def inverse_root(one: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.linalg.cholesky(one + 1e-2 * one.trace() * torch.eye(len(one))))


def matrices(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.ndim == 2]


def optimizers(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.Muon) -> list[torch.optim.Optimizer]:
    """One for matrices, AdamW for the rest."""
    params = dict(model.named_parameters())
    first = kind([param for param in params.values() if param.ndim == 2], lr=1e-2)  # type: ignore[call-arg]
    return [first, torch.optim.AdamW([param for param in params.values() if param.ndim != 2], lr=1e-2)]


def compiled_of(rank: int, kind: str, **options: object) -> zcompile.CompiledModule:
    """Other values on other ranks: rank 0's must win."""
    model = make(kind, rank)
    return zcompile.compile(model, whole=matrices(model), backend="eager", **options)  # type: ignore[arg-type]


def reference(kind: str, world: int, replicas: int = 1, first: Any = torch.optim.Muon, **options: Any) -> Values:
    by = functools.partial(optimizers, kind=first)
    return one_process(kind, (replicas, world // replicas), by=by, **options)


def train(rank: int, kind: str, shape: Shape | None = None, first: Any = torch.optim.Muon, **options: Any) -> Values:
    by = functools.partial(optimizers, kind=first)
    return hybrids.train(rank, kind, shape, by=by, whole=matrices(make(kind)), **options)


def sweep(rank: int, kind: str, world: int, choices: list[tuple[int, int]]) -> list[str]:
    want = reference(kind, world)
    found = []
    for stage, prefetch in choices:
        got = train(rank, kind, stage=stage, prefetch=prefetch)
        found += [f"stage {stage} prefetch {prefetch}: {name}" for name in differing(got, want)]
    return found


KINDS = ("gpt", "mlp", "tied", "conv")


@pytest.mark.slow
@quickly("world, kind", [(world, kind) for world in (1, 2, 3, 4) for kind in KINDS], [(3, "tied")], slow=[(2, "gpt")])
def test_muon_steps_as_on_one_process_bit_for_bit(threads: Threads, world: int, kind: str) -> None:
    choices = [(stage, prefetch) for stage in range(1, 4) for prefetch in range(3)]
    assert threads.run(world, sweep, kind, world, choices if kind != "tied" else choices[2::3]) == [[]] * world


WAYS = ("replicas", "micro-batches", "shampoo", "a disk", "arenas", "a bucket", "checkpoints")


@pytest.mark.slow
@quickly("name", WAYS, ["replicas", "shampoo"])
@on_threads(4)
def test_other_ways_of_training_give_the_same_bits(rank: int, name: str, tmp_path: Path) -> list[str]:
    """What differs from one process, in each of several ways of training."""
    if name == "replicas":
        return differing(train(rank, "mlp", (2, 2)), reference("mlp", 4, replicas=2))
    if name == "micro-batches":  # where full gradients are kept they are added before they are averaged
        return differing(train(rank, "mlp", synchronised=(False, True), stage=1), reference("mlp", 4, batches=2))
    if name == "shampoo":
        return differing(train(rank, "mlp", first=Whitening), reference("mlp", 4, first=Whitening))
    if name == "a disk":
        got = train(rank, "mlp", offload_parameters=f"disk:{tmp_path}", offload_activations=f"disk:{tmp_path}")
        return differing(got, reference("mlp", 4))
    options = {"arenas": {"arenas": True}, "a bucket": {"bucket": 4096}, "checkpoints": {"checkpoint": "unit"}}[name]
    return differing(train(rank, "gpt", **options), reference("gpt", 4))


@on_threads(3)
def test_gradients_are_clipped_by_the_norm_of_all(rank: int) -> None:
    got, want = train(rank, "mlp", clip=0.05), reference("mlp", 3, clip=0.05)
    assert max(float((got[name] - want[name]).abs().max()) for name in want) < 1e-6


BY = (torch.optim.Muon, Whitening)


@quickly("kind, by", [(kind, by) for kind in ("gpt", "mlp") for by in BY], [("mlp", BY[1])])
@on_threads(3)
def test_a_train_step_updates_matrices_where_their_gradients_arrive(
    rank: int, kind: str, by: type[torch.optim.Optimizer], tmp_path: Path
) -> list[str]:
    """Parameters that differ from one process after train steps, with the state in memory and on a disk."""
    found = []
    places = (("memory", {}), ("a disk", {"offload_optimizer": f"disk:{tmp_path}"}))
    for name, options in places if by is torch.optim.Muon else places[:1]:
        model = make(kind, rank)
        some = optimizers(model, by)
        loss = None
        step = zcompile.train_step(model, loss, some, whole=matrices(model), backend="eager", **options)
        for number in range(STEPS):
            step(*batch(kind, rank, number))
        found += [f"{name}: {one}" for one in differing(parameters(step.model), reference(kind, 3, first=by))]
    return found


@contextlib.contextmanager
def orthogonalised() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of matrices that Muon orthogonalises meanwhile."""
    shapes: list[tuple[int, ...]] = []
    module = torch.optim._muon  # type: ignore[attr-defined]
    real = module._zeropower_via_newtonschulz

    def noted(grad: torch.Tensor, *args: object) -> torch.Tensor:
        shapes.append(tuple(grad.shape))
        result: torch.Tensor = real(grad, *args)
        return result

    with mock.patch.object(module, "_zeropower_via_newtonschulz", noted):
        yield shapes


def counted(rank: int) -> tuple[list[tuple[int, ...]], int, int]:
    """What is orthogonalised on this rank in a step, the elements of its state, and what the optimizer sends."""
    compiled = compiled_of(rank, "gpt")
    muon, _ = optimizers(compiled)
    compiled(*batch("gpt", rank, 0)).backward()
    muon.step()  # at the first one it is tried out
    before = compiled.traffic.payload
    with orthogonalised() as shapes:
        muon.step()
    state = sum(slots["momentum_buffer"].to_local().numel() for slots in muon.state.values())
    return shapes, state, compiled.traffic.payload - before


@pytest.mark.slow
def test_each_matrix_is_orthogonalised_once_and_kept_once(threads: Threads) -> None:
    found = threads.run(4, counted)
    want = [tuple(param.shape) for param in make("gpt").parameters() if param.ndim == 2]
    assert sorted(shape for shapes, _, _ in found for shape in shapes) == sorted(want)
    assert sum(state for _, state, _ in found) == sum(height * width for height, width in want)
    assert max(state for _, state, _ in found) <= 4 / 3 * sum(height * width for height, width in want) / 4
    assert all(sent == 0 for _, _, sent in found)


# -- what a user may do with such parameters --------------------------------------------------------------------------


@pytest.mark.slow
@on_threads(3)
def test_what_treats_elements_alone_works_on_parameters_with_an_owner(rank: int) -> list[str]:
    compiled = compiled_of(rank, "mlp")
    plain = {name: param.detach().clone() for name, param in make("mlp", 0).named_parameters()}
    compiled(*batch("mlp", rank, 0)).backward()
    problems = []

    def check(what: str, holds: bool) -> None:
        problems.extend([] if holds else [what])

    for name, param in compiled.named_parameters():
        if param.ndim != 2:
            continue
        want, grad = plain[name], param.grad
        whole = grad.full_tensor()
        check("its shape", param.shape == want.shape and grad.shape == want.shape)
        check("full_tensor", torch.equal(param.full_tensor(), want))
        check("redistribute", torch.equal(param.redistribute(placements=[Replicate()]).to_local(), want))
        check("a sum", torch.allclose(param.detach().sum().full_tensor(), want.sum()))
        check("a norm", torch.allclose(grad.norm().full_tensor(), whole.norm()))
        check("arithmetic", torch.equal((2 * param.detach() + 1).full_tensor(), 2 * want + 1))
        check("of gradients", torch.equal((grad * grad).sqrt().full_tensor(), (whole * whole).sqrt()))
        check("a copy", torch.equal(copy.deepcopy(param).full_tensor(), want))
        check("a copy of a gradient", torch.equal(copy.deepcopy(grad).full_tensor(), whole))
        with torch.no_grad():
            param.mul_(2)
            check("in place", torch.equal(param.full_tensor(), 2 * want))
            param.copy_(param / 2)
            check("copy_", torch.equal(param.full_tensor(), want))
    params = [param.detach() for param in compiled.parameters() if isinstance(param, DTensor)]
    average = [param.clone() for param in params]
    torch._foreach_mul_(average, 3.0)
    torch._foreach_lerp_(average, params, 0.5)
    whole_ = [(got.full_tensor(), param.full_tensor()) for got, param in zip(average, params, strict=True)]
    check("an average of lists", all(torch.allclose(got, 2 * value) for got, value in whole_))
    return problems


@pytest.mark.slow
@on_threads(2)
def test_what_needs_rows_of_others_is_refused(rank: int) -> None:
    compiled = compiled_of(rank, "mlp")
    compiled(*batch("mlp", rank, 0)).backward()
    params = [param for param in compiled.parameters() if param.ndim == 2]
    one, other = params[0], next(p for p in params if p.zcompile_owner != params[0].zcompile_owner)
    row = next(param for param in compiled.parameters() if param.ndim == 1)
    replicated = DTensor.from_local(one.full_tensor(), one.device_mesh, [Replicate()])
    tries = [
        lambda: one.detach() @ one.detach().T,
        lambda: one.grad @ one.grad.mT,
        lambda: one.detach()[0],
        lambda: one.grad.mean(),
        lambda: one.grad.max(),
        lambda: one.grad.view(-1),
        lambda: torch.cat([one.grad, one.grad]),
        lambda: one.detach().add(other.detach()),
        lambda: one.detach() + row.detach(),
        lambda: torch.linalg.qr(one.grad),
        lambda: one.grad.norm(p="nuc"),
        lambda: one.detach().copy_(replicated),
        lambda: one.detach() * replicated,
        lambda: torch._foreach_mul([one.detach()], [replicated]),
        lambda: torch.add(input=one.detach(), other=other.detach()),
        lambda: one.grad.sum(dim=1),
        lambda: one.redistribute(placements=[torch.distributed.tensor.Shard(1)]),
        lambda: pickle.dumps(one.grad),
    ]
    for act in tries:
        with pytest.raises(ParameterError, match="whole on rank"):
            act()
    with pytest.raises(zcompile.StateError, match="holds this rank's shards"):
        torch.save(compiled.state_dict(), "/dev/null")


# -- state ------------------------------------------------------------------------------------------------------------


def saved(rank: int, folder: str, by: type[torch.optim.Optimizer]) -> Values:
    compiled = compiled_of(rank, "mlp")
    some = optimizers(compiled, by)
    for step in range(2):
        compiled(*batch("mlp", 0, step)).backward()
        update(*some)
    compiled.save_checkpoint(folder, some[0])
    compiled.save_checkpoint(f"{folder} of the rest", some[1])
    compiled.save_full_state_dict(f"{folder}.pt")
    dcp.save(compiled.state_dict(), checkpoint_id=f"{folder} by torch")
    return parameters(compiled)


def loaded(rank: int, folder: str, by: type[torch.optim.Optimizer], whole: bool) -> tuple[Values, Values | None]:
    """What a checkpoint gives in another layout, and the parameters after one more step on the same batch, if any."""
    model = make("mlp", 5)
    compiled = zcompile.compile(model, whole=matrices(model) if whole else None, backend="eager")
    some = optimizers(compiled, by)
    compiled.load_checkpoint(folder, some[0])
    compiled.load_checkpoint(f"{folder} of the rest", some[1])
    found = parameters(compiled)
    compiled.load_full_state_dict(torch.load(f"{folder}.pt"))
    state = compiled.state_dict()
    dcp.load(state, checkpoint_id=f"{folder} by torch")
    assert not differing(parameters(compiled), found)
    compiled(*batch("mlp", 0, 2)).backward()
    if not whole and compiled.layout.world > 1:  # the last matrix has a single row, which torch cannot divide
        with pytest.raises(ParameterError, match="of shape"):
            some[0].step()
        return found, None
    for optimizer in some:
        optimizer.step()
    return found, parameters(compiled)


@pytest.mark.slow
@quickly("by", [torch.optim.Muon, Whitening], [Whitening])
def test_a_checkpoint_loads_in_other_worlds_and_layouts(
    ranks: Ranks, by: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    values = ranks.run(4, saved, folder, by)[0]
    assert not differing(torch.load(f"{folder}.pt"), values)
    layouts = [(4, True), (3, True), (1, True), *([(3, False), (1, False)] if by is torch.optim.Muon else [])]
    after: list[tuple[bool, Values]] = []
    for world, whole in layouts:
        for found, stepped_ in ranks.run(world, loaded, folder, by, whole):
            assert not differing(found, values)
            after += [] if stepped_ is None else [(whole, stepped_)]
    for whole, one in after:  # by rows torch's Muon multiplies matrices in parts, in bfloat16
        assert all(torch.allclose(one[n], after[0][1][n], atol=1e-6 if whole else 1e-2) for n in one)
    assert any(not torch.equal(after[0][1][name], values[name]) for name in values)


@pytest.mark.slow
@on_threads(3)
def test_a_matrix_of_fewer_rows_than_ranks_is_refused_to_muon(rank: int) -> None:
    """The last one has a single row. Torch divides no such tensor, which it says of no parameter."""
    model = zcompile.compile(make("mlp"), backend="eager")
    model(*batch("mlp", rank, 0)).backward()
    with pytest.raises(ParameterError) as raised:
        torch.optim.Muon([param for param in model.parameters() if param.ndim == 2]).step()
    message = str(raised.value)
    assert "of shape [1, 5] by rows on 3 ranks" in message
    assert "layers.2.weight: add_ writes" in message
    assert "whole=" in message


def recorded(rank: int, folder: str) -> None:
    hybrids.recorded(rank, folder, "mlp", None, by=optimizers, whole=matrices(make("mlp")))


@pytest.mark.slow
def test_a_step_is_proven_across_ranks_and_replayed(threads: Threads, tmp_path: Path) -> None:
    threads.run(3, recorded, str(tmp_path))
    assert_proven_and_replayed(tmp_path, 3)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "said"), [(["block.*"], "matches no parameter"), ("layers.0.weight", "is not a list of names")]
)
def test_patterns_that_match_nothing(whole: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        zcompile.compile(make("mlp"), whole=whole)  # type: ignore[arg-type]


class Derived(torch.optim.AdamW):
    """Nothing is known of it."""


def one_group(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [Derived(model.parameters(), lr=1e-2, foreach=True)]


@pytest.mark.slow
@on_threads(3)
def test_an_optimizer_of_elements_takes_both_kinds_in_one_group(rank: int) -> list[str]:
    """Matrices with owners, and vectors by rows."""
    got = hybrids.train(rank, "mlp", None, by=one_group, whole=matrices(make("mlp")))
    return differing(got, one_process("mlp", (1, 3), by=one_group))


class First(torch.optim.SGD):
    """Looks at the first parameter of each group."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert all(group["params"][0].device.type == "cpu" for group in self.param_groups)
        super().step(closure)


class Clipping(torch.optim.SGD):
    """Clips by the norm of all its gradients."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            nn.utils.clip_grad_norm_([param for param in group["params"] if param.grad is not None], 0.01)
        super().step(closure)


class Adapting(torch.optim.SGD):
    """Its rate follows from the gradients of all its parameters, as that of D-Adaptation."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 1 + float(sum(param.grad.abs().sum() for param in group["params"]))  # type: ignore[misc]
        super().step(closure)


@pytest.mark.slow
@on_threads(4)
def test_an_optimizer_that_looks_at_all_matrices_is_refused(rank: int) -> None:
    """And of one that looks at the first, nothing is said."""
    compiled = compiled_of(rank, "mlp")
    found = []
    for kind in (Clipping, Adapting, First):
        optimizer = kind([param for param in compiled.parameters() if param.ndim == 2], lr=0.1)
        compiled(*batch("mlp", rank, 0)).backward()
        try:
            optimizer.step()
        except OptimizerError as error:
            found.append(str(error))
        compiled.zero_grad()
    assert len(found) == 2
    assert all("steps a parameter differently when others are present" in said for said in found)


@pytest.mark.slow
@on_threads(3)
def test_the_largest_element_of_what_a_rank_does_not_have(rank: int) -> None:
    compiled = compiled_of(rank, "mlp")
    compiled(*batch("mlp", rank, 0)).backward()
    grads = [param.grad for param in compiled.parameters()]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    largest = nn.utils.get_total_norm(grads, norm_type=float("inf"))
    largest = largest.full_tensor() if isinstance(largest, DTensor) else largest
    alone = grads[0].norm(float("inf")).full_tensor()
    off = [largest - max(grad.abs().max() for grad in whole), alone - whole[0].abs().max()]
    assert [float(one) for one in off] == [0.0, 0.0]


@pytest.mark.slow
@on_threads(2)
def test_a_gradient_may_be_made_whole(rank: int) -> list[str]:
    """A gradient that the user has made whole on every rank is the owner's all the same."""
    values = []
    for whole in (False, True):
        compiled = compiled_of(0, "mlp")
        compiled(*batch("mlp", rank, 0)).backward()
        for param in compiled.parameters():
            if whole and param.ndim == 2:
                param.grad = param.grad.redistribute(placements=[Replicate()])
        for optimizer in optimizers(compiled):
            optimizer.step()
        values.append(parameters(compiled))
    return differing(*values)


@pytest.mark.slow
@on_threads(2)
def test_muon_over_whole_matrices_and_rows_is_told_so(rank: int) -> None:
    model = make("mlp", 0)
    compiled = zcompile.compile(model, whole=["layers.0.weight"], backend="eager")
    first, _ = optimizers(compiled)
    compiled(*batch("mlp", rank, 0)).backward()
    with pytest.raises(OptimizerError) as caught:
        first.step()
    said = str(caught.value)
    assert "together with some that ranks divide" in said


@pytest.mark.slow
@on_threads(2)
def test_an_optimizer_of_whole_matrices_over_rows_is_told_of_owners(rank: int) -> None:
    compiled = zcompile.compile(make("mlp", 0), backend="eager")
    first, _ = optimizers(compiled, Whitening)
    compiled(*batch("mlp", rank, 0)).backward()
    with pytest.raises(OptimizerError) as caught:
        first.step()
    said = str(caught.value)
    assert "whole=" in said


@on_threads(2)
def test_an_optimizer_that_flattens_is_refused(rank: int) -> None:
    compiled = compiled_of(rank, "mlp")
    optimizer = torch.optim.LBFGS(compiled.parameters())

    def closure() -> torch.Tensor:
        loss: torch.Tensor = compiled(*batch("mlp", rank, 0))
        loss.backward()
        return loss

    with pytest.raises(OptimizerError) as caught:
        optimizer.step(closure)
    said = str(caught.value)
    assert "leave it out of whole=" in said


@on_ranks(2)
def test_what_tensor_parallelism_divides_has_no_owner(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(OptionError) as caught:
        zcompile.compile(model, mesh=mesh["dp"], whole=["0.weight"], backend="eager")
    said = str(caught.value)
    assert "tensor parallelism divides" in said


@on_ranks(2)
def test_ranks_that_disagree_on_owners(rank: int) -> None:
    model = make("mlp", 0)
    with pytest.raises(zcompile.AgreementError) as caught:
        zcompile.compile(model, whole=matrices(model)[: 1 + rank], backend="eager")
    said = str(caught.value)
    assert "whole on rank" in said
