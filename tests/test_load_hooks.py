"""Hooks of state dicts and of loading them: they run once, before anything is compared, and submodules load, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.utils.parametrizations import weight_norm

import zcompile
from tests.cases import quickly
from tests.ranks import Ranks, on_ranks
from zcompile import StateError

State = dict[str, Any]


class Renamed(nn.Linear):
    """Its weight is `kernel` in state dicts, and transposed."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_load_state_dict_pre_hook(Renamed.rename)

    def rename(self, state: State, prefix: str, *_: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel").T.contiguous()


class Padded(nn.Embedding):
    """A vocabulary that has been padded since."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_load_state_dict_pre_hook(Padded.pad)

    def pad(self, state: State, prefix: str, *_: Any) -> None:
        value = state[prefix + "weight"]
        state[prefix + "weight"] = nn.functional.pad(value, (0, 0, 0, 8 - len(value)))


class Overridden(nn.Linear):
    """What loads it has another dict made, a buffer of another size, and a value that is added."""

    sizes: torch.Tensor

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("sizes", torch.zeros(0))

    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        made = {key.replace("_orig", ""): value for key, value in state_dict.items()}
        self.sizes = torch.zeros(len(made[prefix + "sizes"]))
        made.setdefault(prefix + "bias", torch.full((4,), 3.0))
        super()._load_from_state_dict(made, prefix, *rest)  # type: ignore[arg-type]


class Kept(nn.Linear):
    """A state without a bias leaves the one that is there; the hook behind says that this is right."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_load_state_dict_post_hook(Kept.excuse)

    def excuse(self, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith("bias")]


class Filled(nn.Linear):
    """The older way to register a hook; what a state does not have, it has from the module itself."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self._register_load_state_dict_pre_hook(self.fill)

    def fill(self, state: State, prefix: str, *_: Any) -> None:
        state.setdefault(prefix + "bias", self.bias)
        state.setdefault(prefix + "weight", self.weight.detach())


class Counting(nn.Linear):
    """Extra state, set once a load."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.extra: list[int] = []

    def get_extra_state(self) -> int:
        return len(self.extra)

    def set_extra_state(self, state: int) -> None:
        self.extra.append(state)


def normalised() -> nn.Module:
    return weight_norm(nn.Linear(8, 4))


WEIGHT, BIAS = torch.arange(32.0).view(4, 8), torch.ones(4)
CASES: dict[str, tuple[Callable[[], nn.Module], State]] = {
    "renamed": (Renamed, {"kernel": WEIGHT.T.contiguous(), "bias": BIAS}),
    "padded": (Padded, {"weight": torch.arange(24.0).view(6, 4)}),
    "weight_norm": (normalised, {"weight_g": torch.full((4, 1), 2.0), "weight_v": WEIGHT, "bias": BIAS}),
    "overridden": (Overridden, {"weight_orig": WEIGHT, "sizes": torch.ones(3)}),
    "kept": (Kept, {"weight": WEIGHT}),
    "filled": (Filled, {"weight": WEIGHT}),
    "extra": (Counting, {"weight": WEIGHT, "bias": BIAS, "_extra_state": 7}),
}


def values(model: nn.Module) -> State:
    state = dict(model.state_dict())
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def same(one: State, other: State) -> bool:
    equal = (torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k] for k, v in one.items())
    return one.keys() == other.keys() and all(equal)


def ways(compiled: Any, given: nn.Module, state: State) -> dict[str, Callable[[], object]]:
    """Ways to load the state of a model of one module."""
    whole = {f"0.{key}": value for key, value in state.items()}
    first = whole if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, strict=False)
    return {
        "compiled": lambda: compiled.load_state_dict(whole),
        "not strict": lambda: compiled.load_state_dict(whole, strict=False),
        "assigned": lambda: compiled.load_state_dict(whole, assign=True),
        "given": lambda: given.load_state_dict(whole),
        "submodule": lambda: compiled.get_submodule("0").load_state_dict(state),
        "full": lambda: compiled.load_full_state_dict(whole),
        "first rank": lambda: compiled.load_full_state_dict(first),
        "torch's": lambda: set_model_state_dict(compiled, whole, options=options),
    }


WAYS = ["compiled", "not strict", "assigned", "given", "submodule", "full", "first rank", "torch's"]


EVERY = [(case, way) for case in CASES for way in WAYS]
FEW = [(case, way) for number, case in enumerate(CASES) for way in (WAYS[number], WAYS[number - 1])]
FEW.append(("overridden", "first rank"))


@quickly("stage,chosen", [(3, FEW), *((stage, EVERY) for stage in range(4))], [(3, FEW)])
@on_ranks(2)
def test_what_hooks_make_of_a_state_is_what_is_loaded(
    rank: int, stage: int, chosen: list[tuple[str, str]]
) -> list[str]:
    """The cases and ways in which what is loaded is not what the plain model has loaded."""
    wrong = []
    for name, way in chosen:
        make, state = CASES[name]
        torch.manual_seed(0)
        plain = nn.Sequential(make())
        given = copy.deepcopy(plain)
        ways(plain, plain, copy.deepcopy(state))[way if way == "torch's" else "given"]()
        compiled = zcompile.compile(given, stage=stage, backend="eager")
        try:
            ways(compiled, given, copy.deepcopy(state))[way]()
        except zcompile.ZcompileError as error:
            wrong.append(f"{name}, {way}: {error}")
        else:
            if not same(values(plain), values(compiled)):
                wrong.append(f"{name}, {way}: other values")
    return wrong


def failed(rank: int) -> list[str]:
    """A hook that fails on one rank alone, and values that do not fit behind it: nothing is loaded on any rank."""

    def fail(*_: Any) -> None:
        if rank == 1:
            raise KeyError("no vocabulary")

    def misshape(_: Any, state: State, prefix: str, *__: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"][:, 1:]

    found = []
    for hook in (fail, misshape):
        compiled = zcompile.compile(nn.Sequential(Counting(), nn.Linear(4, 8)), stage=3, backend="eager")
        before = values(compiled)
        state = {name: value + 1 for name, value in before.items()}
        compiled.get_submodule("1").register_load_state_dict_pre_hook(hook)
        for load in (compiled.load_state_dict, compiled.load_full_state_dict):
            with pytest.raises(StateError) as error:
                load(state)
            found.append(str(error.value))
        assert same(values(compiled), before)
    return found


def test_nothing_is_loaded_where_a_hook_fails(ranks: Ranks) -> None:
    one, two = ranks.run(2, failed)
    assert one == two
    assert "failed on rank 1: KeyError: 'no vocabulary'" in one[0]
    assert "size mismatch for 1.weight" in one[2]


def test_hooks_of_states_run_once() -> None:
    """Of the model's modules and of the compiled one, in saving and in loading."""
    compiled = zcompile.compile(nn.Sequential(Counting(), nn.Linear(4, 8)), stage=3, backend="eager")
    log: list[str] = []
    for name, module in {"compiled": compiled, "inner": compiled.get_submodule("1")}.items():
        module.register_state_dict_pre_hook(lambda *_, name=name: log.append(f"{name} before saving"))
        module.register_state_dict_post_hook(lambda *_, name=name: log.append(f"{name} saved"))
        module.register_load_state_dict_pre_hook(lambda *_, name=name: log.append(f"{name} before loading"))
        module.register_load_state_dict_post_hook(lambda *_, name=name: log.append(f"{name} loaded"))
    saving = ["compiled before saving", "inner before saving", "inner saved", "compiled saved"]
    loading = ["compiled before loading", "inner before loading", "inner loaded", "compiled loaded"]
    state = compiled.state_dict()
    assert log == saving
    whole = compiled.full_state_dict()
    assert log == saving * 2
    log.clear()
    compiled.load_state_dict(state)
    compiled.load_full_state_dict(whole)
    assert log == loading * 2
    assert len(compiled.get_submodule("0").extra) == 2


def through_checkpoint(rank: int, folder: str) -> tuple[list[str], bool]:
    log: list[str] = []

    def rename(_: nn.Module, state: State, prefix: str, *__: Any) -> None:
        log.append("saved")
        state[prefix + "kernel"] = state.pop(prefix + "weight").T.contiguous()

    def made() -> Any:
        model = zcompile.compile(nn.Sequential(Renamed()), stage=3, backend="eager")
        model.get_submodule("0").register_state_dict_post_hook(rename)
        model.get_submodule("0").register_load_state_dict_pre_hook(lambda *_: log.append("loading"))
        return model

    one, two = made(), made()
    one.save_checkpoint(folder)
    two.load_checkpoint(folder)
    return log, torch.equal(one[0].weight.full_tensor(), two[0].weight.full_tensor())


def test_checkpoints_of_states_that_hooks_change(ranks: Ranks, tmp_path: Path) -> None:
    """Each hook runs once, and what one renames in saving another one renames in loading."""
    log = ["saved", "saved", "loading"]  # the second one for the names that are looked for in the checkpoint
    assert ranks.run(2, through_checkpoint, str(tmp_path / "checkpoint")) == [(log, True)] * 2
