"""Materializes the full initial values of a model, one unit at a time.

    embed  blocks.0  blocks.1  head      the turn of blocks.0: only it has memory, and writes of the
    meta   ########  meta      meta      model's code to other parameters have no effect

So any code that initializes a model can initialize a single unit, and the peak memory is one unit in addition to the
shards. Modules without parameters, which belong to no unit, have a turn of their own after all units.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zcompile.errors import ModelError, OptionError
from zcompile.ir.layout import Layout, Param, Unit
from zcompile.model.weights import Weights, rounds, takes
from zcompile.runtime.groups import Communicator
from zcompile.torch_internals.autograd import version_of
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.modules import TensorPlace, tensor_places

Method = Callable[..., Any]


class Materialiser:
    """Full values of a model's parameters and buffers: from the model itself, its initialization code, or `weights`.

    Tensors with memory keep their values unless there are weights; tensors on meta get memory. Every call leaves the
    module tree unchanged, except `place_buffers`.
    """

    def __init__(self, model: nn.Module, layout: Layout, communicator: Communicator, weights: Weights | None) -> None:
        self.weights = weights
        self.communicator = communicator
        self.device = communicator.device
        self.code = InitCode(model, layout)
        self.places = list(tensor_places(model.named_modules(remove_duplicate=False)))
        self.first = _first_places(self.places)
        self.parameters = dict(model.named_parameters())
        self.blank = {id(param): _blank(param, self.device) for param in self.parameters.values()}
        self.buffers: dict[int, torch.Tensor] = {}
        """New values of buffers, by the `id` of the buffer in the module tree."""
        self.stored = _match(weights, self.places) if weights else {}

    def full(self, unit: Unit) -> Iterator[tuple[Param, nn.Parameter]]:
        """Yield each parameter of `unit` with its values on this rank; raise ModelError for one left unwritten."""
        made = self._turn(unit.name)
        for param in unit.params:
            original = self.parameters[param.name]
            yield param, made.pop(id(original)) if id(original) in made else self._given(original)

    def skip(self, unit: Unit) -> None:
        """Run the model's code for a `unit` of another rank, for its buffers and its random draws."""
        self._turn(unit.name)

    def place_buffers(self) -> None:
        """Give every buffer memory in the module tree, after all units; raise ModelError for one left unwritten."""
        self._turn(None)
        if any(place.held.is_meta for place in self.places):
            self._refuse_stray_tensors()
        for place in self.places:
            if isinstance(place.held, nn.Parameter):
                continue
            if id(place.held) in self.stored:
                self.buffers.setdefault(id(place.held), self._stored(place.held))
            if id(place.held) in self.buffers:
                place.table[place.key] = self.buffers[id(place.held)]

    def _given(self, original: nn.Parameter) -> nn.Parameter:
        """Return `original`, with its values from the weights if there are any."""
        if id(original) not in self.stored:
            return original
        value = self._stored(original)
        return nn.Parameter(value, original.requires_grad) if original.is_meta else original

    def _stored(self, original: torch.Tensor) -> torch.Tensor:
        """Return the weights for `original`, in its memory if it has any; on other ranks, memory to broadcast into."""
        device = self.device if original.is_meta else original.device
        value = self._read(self.stored[id(original)], original)
        if value is None:
            return torch.empty(original.shape, dtype=original.dtype, device=device) if original.is_meta else original
        return value.to(device, original.dtype) if original.is_meta else original.copy_(value)

    def _read(self, name: str, original: torch.Tensor) -> torch.Tensor | None:
        """Return the weights `name` for `original` on rank 0, else None; raise OptionError on all ranks. Collective."""
        assert self.weights is not None, "only weights are read"
        value, problem, why = None, "", "the first rank cannot read it"
        try:
            value = None if self.communicator.rank else self.weights.read(name)
            problem = "" if value is None else _problem(value, original)
        except Exception as error:  # from a disk, a network, or a file that is truncated while it is read
            problem, why = PROBLEMS[0], f"{type(error).__name__}: {error}"
        codes = torch.tensor([problem == known for known in PROBLEMS], dtype=torch.int32)
        for template, found in zip(PROBLEMS, self.communicator.any_rank(codes).tolist(), strict=True):
            if found:
                reason = template.format(dtype=original.dtype, why=why)
                fix = "fix the source, build the model again and repeat: values of this one may be gone"
                raise OptionError("weights", f"{name} of {self.weights.source} {reason}", fix)
        return value

    # -- the model's own code -------------------------------------------------------------------------------------

    def _turn(self, unit: str | None) -> dict[int, nn.Parameter]:
        """Run the model's code for the tensors of `unit` on meta; return parameters by `id`, store buffers."""
        wanted = [
            place
            for place in self.first.values()
            if place.held.is_meta and id(place.held) not in self.stored and self.code.turn(place) == unit
        ]
        if not wanted:
            return {}
        real = {id(place.held): _unwritten(place.held, self.device) for place in wanted}
        versions = {key: version_of(tensor) for key, tensor in real.items()}
        with self._only_materialised(real), torch.device(self.device), torch.no_grad():
            self.code.run(unit)
            result = {id(place.held): _found(place) for place in wanted}
        for place in wanted:
            key = id(place.held)
            if result[key] is real[key] and not _is_written(result[key], versions[key]):
                fix = f"give {place.path or 'the model'} a reset_parameters() that writes it, or pass weights="
                raise ModelError(place.name, "is on the meta device, and nothing gives it values", fix)
        parameters = {}
        for place in wanted:
            value = result[id(place.held)].detach().to(self.device)
            if isinstance(place.held, nn.Parameter):
                parameters[id(place.held)] = nn.Parameter(value, place.held.requires_grad)
            else:
                self.buffers[id(place.held)] = value
        return parameters

    @contextlib.contextmanager
    def _only_materialised(self, real: dict[int, torch.Tensor]) -> Iterator[None]:
        """Put `real` into the module tree, with all other parameters on meta; restore the tree afterwards."""
        try:
            for place in self.places:
                key = id(place.held)
                place.table[place.key] = real.get(key, self.blank.get(key, place.held))
            yield
        finally:
            for place in self.places:
                place.table[place.key] = place.held

    def _refuse_stray_tensors(self) -> None:
        for path, module in self.code.modules.items():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    fix = f"register it: self.register_buffer({key!r}, ..., persistent=False)"
                    found = "is on the meta device, and neither a parameter nor a buffer"
                    raise ModelError(f"{path}.{key}" if path else key, found, fix)


class InitCode:
    """The model's initialization code, and the turns on which it runs.

    On a turn: `reset_parameters()` of each module in or around the unit, children first as in construction;
    `init_weights()` of the outermost module of the unit; `_init_weights(module)`, as Hugging Face calls it, of the
    nearest enclosing module that has it; `init_weights()` of the outermost module around the unit and others.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.modules = dict(model.named_modules())
        self.layout = layout
        self.turns: dict[str, set[str | None]] = {}
        """The turns on which the code of each module runs; None is the turn after all units."""
        self.hooks: dict[str, Method | None] = {}
        units = _units_within(layout)
        for path, module in self.modules.items():
            around: set[str | None] = self.turns[_parent(path)] if path else {None}
            turns = units[path] or (around if len(around) == 1 else {None})
            self.turns[path] = turns | {None} if len(turns) > 1 else turns
            hook = _method(module, "_init_weights", module)
            self.hooks[path] = hook or (self.hooks[_parent(path)] if path else None)

    def turn(self, place: TensorPlace) -> str | None:
        """Return the turn on which the value at a place is computed."""
        if isinstance(place.held, nn.Parameter):
            return self.layout.unit_of(place.name).name
        turns = self.turns[place.path]
        return next(iter(turns)) if len(turns) == 1 else None

    def run(self, unit: str | None) -> None:
        """Run the code of one turn; raise ModelError if it fails."""
        mine = [path for path in _children_first(self.modules) if unit in self.turns[path]]
        for path in mine:
            module = self.modules[path]
            self._call(path, _method(module, "reset_parameters") or _method(module, "_reset_parameters"), unit)
        for path in self._outermost([path for path in self.modules if self.turns[path] == {unit}]):
            self._call(path, _method(self.modules[path], "init_weights"), unit)
        for path in mine:
            self._call(path, self.hooks[path], unit, self.modules[path])
        for path in self._outermost([path for path in self.modules if {unit} < self.turns[path]]):
            self._call(path, _method(self.modules[path], "init_weights"), unit)

    def _outermost(self, paths: list[str]) -> list[str]:
        """Return the outermost paths with an `init_weights()`, except where `_init_weights(module)` is called."""
        result: list[str] = []
        for path in paths:
            inside = any(outer == "" or path.startswith(f"{outer}.") for outer in result)
            if not inside and not self.hooks[path] and _method(self.modules[path], "init_weights"):
                result.append(path)
        return result

    def _call(self, path: str, method: Method | None, unit: str | None, *args: nn.Module) -> None:
        if method is None:
            return
        try:
            method(*args)
        except Exception as error:  # whatever the model's code raises
            subject = path or type(self.modules[path]).__name__
            turn = f"while of all parameters only those of {unit} have memory" if unit else "without any parameter"
            fix = "let it write each parameter by itself, whatever the others hold, or pass weights="
            raise ModelError(subject, f"its {method.__name__}() fails {turn}: {error}", fix) from error


# -- the module tree --------------------------------------------------------------------------------------------------


def _first_places(places: list[TensorPlace]) -> dict[int, TensorPlace]:
    first: dict[int, TensorPlace] = {}
    for place in places:
        first.setdefault(id(place.held), place)
    return first


def _units_within(layout: Layout) -> defaultdict[str, set[str | None]]:
    """Map each module path to the units that have parameters in or below the module."""
    units: defaultdict[str, set[str | None]] = defaultdict(set)
    for param in layout.params:
        path = param.name
        while path:
            path = _parent(path)
            units[path].add(layout.unit_of(param.name).name)
    return units


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _children_first(modules: dict[str, nn.Module]) -> list[str]:
    """Return the paths in the order in which constructors finish."""
    ordered: list[str] = []
    waiting: list[str] = []
    for path in modules:
        while waiting and not (waiting[-1] == "" or path.startswith(f"{waiting[-1]}.")):
            ordered.append(waiting.pop())
        waiting.append(path)
    return ordered + waiting[::-1]


def _method(module: nn.Module, name: str, *args: nn.Module) -> Method | None:
    """Return the method `name` if it can be called with these arguments, else None."""
    method = getattr(module, name, None)
    if not inspect.isroutine(method):
        return None
    try:
        inspect.signature(method).bind(*args)
    except TypeError:
        return None
    result: Method = method
    return result


# -- values -----------------------------------------------------------------------------------------------------------


class _Blank(nn.Parameter):
    """A parameter on meta whose `.device` is the model's, as initialization code creates tables on that device.

    Operations, whose results have no values, see meta.
    """

    zcompile_device: torch.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; `.device` returns the model's device."""
        if func == _DEVICE and isinstance(args[0], cls):
            return args[0].zcompile_device
        with no_torch_function():
            return func(*args, **(kwargs or {}))


_DEVICE = torch.Tensor.device.__get__


def _blank(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return `param` without memory, for code that runs on `device`."""
    made = _Blank(param.detach().to("meta"), param.requires_grad)
    vars(made).update(vars(param))  # attributes that the model's code may read
    made.zcompile_device = device
    return made


def _unwritten(original: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for `original`, filled with NaN if its dtype has it, so that unwritten elements are detected."""
    value = torch.empty(original.shape, dtype=original.dtype, device=device)
    if _has_nan(value):
        value.fill_(torch.nan)
    if isinstance(original, nn.Parameter):
        value = nn.Parameter(value, original.requires_grad)
    vars(value).update(vars(original))  # attributes that the model's code may read
    return value


def _is_written(value: torch.Tensor, version: int) -> bool:
    if value.numel() == 0:
        return True
    if _has_nan(value):
        real = torch.view_as_real(value) if value.is_complex() else value
        return not bool(real.max().isnan())  # not isnan().any(): a mask takes a quarter of the tensor's memory
    return version_of(value) != version


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_complex() or (value.is_floating_point() and value.dtype.itemsize > 1)


def _found(place: TensorPlace) -> torch.Tensor:
    """Return the tensor at a place after the model's code has run, which may have replaced it."""
    value: torch.Tensor | None = place.table[place.key]
    wanted = place.held
    kind = "nothing" if value is None else f"{list(value.shape)} {value.dtype}{' on meta' if value.is_meta else ''}"
    if value is None or value.is_meta or (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        found = f"its module's code puts {kind} in place of {list(wanted.shape)} {wanted.dtype}"
        fix = "let it write in place, as torch.nn.init does, or pass weights="
        if value is not None and value.is_meta:
            found += ", perhaps computed from a parameter: while it runs, those of other units have no values"
            fix += "; what it creates without device= is on the model's device"
        raise ModelError(place.name, found, fix)
    return value


def trim() -> None:
    """Return the pages of freed tensors to the operating system.

    glibc keeps tensors of less than 32 MiB in its heap. There, shards, which stay, are allocated in the holes of the
    previous unit, so that the next unit needs new pages: with GPT-2 XL, 2 GiB of holes were measured.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # no other C library has it
    if malloc_trim is not None:
        malloc_trim(0)


# -- weights ----------------------------------------------------------------------------------------------------------


PROBLEMS = ("cannot be read: {why}", "holds NaN, which no {dtype} parameter starts from", "is too large for {dtype}")


def _problem(value: torch.Tensor, original: torch.Tensor) -> str:
    """Return the one of PROBLEMS that `value` has as `original`, else ""; infinity, and NaN in buffers, are allowed."""
    if not value.numel() or not _has_nan(value):
        return ""
    ends = torch.stack(
        (torch.view_as_real(value) if value.is_complex() else value).aminmax()
    )  # no mask: see _is_written
    if isinstance(original, nn.Parameter) and ends.isnan().any():
        return PROBLEMS[1]
    cast = ends.to(original.dtype.to_real()).double()
    return PROBLEMS[2] if bool((~cast.isfinite() & ends.isfinite()).any()) else ""


def check_weights(weights: Weights, model: nn.Module) -> str:
    """Compare names, shapes and dtypes with the model's; return a note on values that will be rounded, or "".

    Raises:
        ModelError: a name is missing or unknown to the model, or has another shape or kind of numbers there.
    """
    places = list(tensor_places(model.named_modules(remove_duplicate=False)))
    stored, first = _match(weights, places), _first_places(places)
    rounded = [name for key, name in stored.items() if rounds(first[key].held.dtype, weights.kinds[name].dtype)]
    if not rounded:
        return ""
    kept = {place.name: place.held.dtype for place in places}[rounded[0]]
    return f"rounded from {weights.kinds[rounded[0]].dtype} to the model's {kept}: {_some(rounded)} of {weights.source}"


def _match(weights: Weights, places: list[TensorPlace]) -> dict[int, str]:
    """Map the `id` of each parameter and persistent buffer to its name in the weights.

    Raise ModelError for a name that is missing or unknown, or has another shape or kind of numbers in the model.
    """
    stored: dict[int, str] = {}
    saved = [place for place in places if place.saved]
    for place in saved:
        if place.name in weights.kinds:
            stored.setdefault(id(place.held), place.name)
            shape, wanted = weights.kinds[place.name].shape, place.held.shape
            if shape != wanted:
                problem = f"has shape {list(shape)} in {weights.source}, the model's is {list(wanted)}"
                raise ModelError(place.name, problem, "give the weights of this model, or build the model for them")
            if not takes(place.held.dtype, weights.kinds[place.name].dtype):
                problem = f"is {weights.kinds[place.name].dtype} in {weights.source}, the model's is {place.held.dtype}"
                fix = f"give a mapping in which it is converted on purpose, such as by value.to({place.held.dtype})"
                raise ModelError(place.name, problem, fix)
    missing = [place.name for place in _first_places(saved).values() if id(place.held) not in stored]
    unexpected = sorted(weights.kinds.keys() - {place.name for place in saved})
    if missing or unexpected:
        lacks = f"lacks {_some(missing)}" if missing else ""
        has = f"has {_some(unexpected)}, unknown to the model" if unexpected else ""
        fix = "give weights under the names of model.state_dict(): a mapping may rename them"
        raise ModelError(weights.source, "; ".join(filter(None, (lacks, has))), fix)
    return stored


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
