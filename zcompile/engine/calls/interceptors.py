"""Interceptors of calls of a sharded model's modules, and of methods that read a parameter of their own module.

Outside of programs a model's parameters are shards, with which its code cannot compute. So each module with parameters
has an interceptor in place of its `forward`, set on the instance as wrappers of forward usually are, and so does each
method whose code reads a parameter of its module. While the model is traced, or its code runs with full parameters,
interceptors are removed: the plain model is traced.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from zcompile.errors import ModelError
from zcompile.model.units import is_container
from zcompile.torch_internals.modules import parameters_of

Enter = Callable[["MethodInterceptor", tuple[Any, ...], dict[str, Any]], Any]
_MISSING: Any = object()


class MethodInterceptor:
    """Replaces a module's `forward`, or another method, under the name `key`.

    Args:
        module: The module of the method.
        key: The name of the method.
        enter: Called instead, with the interceptor and the arguments of the call.
    """

    def __init__(self, module: nn.Module, key: str, enter: Enter) -> None:
        self.module, self.key, self.enter = module, key, enter
        self._enter = torch.compiler.disable(enter, reason="it is compiled by zcompile already")
        self.before = vars(module).get(key, _MISSING)
        self.is_out = True
        self.method: Callable[..., Any] = getattr(module, key)
        """The method that it replaces."""
        self.__name__, self.__doc__ = key, self.method.__doc__
        self.__wrapped__ = self.method  # for inspect.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A wrapper around it may call it even while interceptors are removed, as torch.compile does when tracing.
        return self.method(*args, **kwargs) if self.is_out else self._enter(self, args, kwargs)

    def __deepcopy__(self, _: object) -> NoReturn:
        fix = "copy the model before zcompile.compile"
        raise ModelError(type(self.module).__name__, "is a module of a compiled model, and cannot be copied", fix)

    def __reduce__(self) -> NoReturn:
        fix = "save compiled.full_state_dict(), or a checkpoint: compiled.save_checkpoint(folder)"
        raise ModelError(type(self.module).__name__, "is a module of a compiled model, and cannot be pickled", fix)


@contextlib.contextmanager
def taken_out(interceptors: Sequence[MethodInterceptor]) -> Iterator[None]:
    """Inside, these interceptors are removed from their modules; those removed before stay removed afterwards."""
    taken = [interceptor for interceptor in interceptors if not interceptor.is_out]
    for interceptor in taken:
        held, interceptor.is_out = interceptor.module.__dict__, True
        if interceptor.key in held and held[interceptor.key] is interceptor:  # it has not been replaced since
            if interceptor.before is _MISSING:
                del held[interceptor.key]
            else:
                held[interceptor.key] = interceptor.before
    try:
        yield
    finally:
        put(taken)


def put(interceptors: Iterable[MethodInterceptor]) -> None:
    """Install each interceptor, if its module still has what it had before.

    A model has hundreds, and does this in each call: avoid Python calls for each.
    """
    for interceptor in interceptors:
        held, interceptor.is_out = interceptor.module.__dict__, False
        now = held[interceptor.key] if interceptor.key in held else _MISSING  # noqa: SIM401  # avoids a call
        if now is interceptor.before or now == interceptor.method:  # a bound method read and set again
            held[interceptor.key] = interceptor


def intercepted_methods(module: nn.Module) -> Iterator[str]:
    """The methods of a module to intercept: `forward`, if it has any parameters, and those that read its own."""
    if not is_container(module) and next(module.parameters(), None) is not None:
        yield "forward"
    own = {key for key, parameter in parameters_of(module).items() if parameter is not None}
    own |= {key for key, child in module.named_children() if is_container(child) and parameters_of(child)}
    if not own:
        return
    functions = _functions_of(type(module))
    for name in functions:
        if name not in ("forward", "extra_repr") and own & _names_read(name, functions):
            yield name


def draws_in_place(module: nn.Module, name: str) -> bool:
    """True for a method whose code fills tensors with random numbers, as methods that initialize parameters do."""
    return bool(_FILLS_RANDOMLY & _names_read(name, _functions_of(type(module))))


_FILLS_RANDOMLY = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
    *(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")),
    "reset_parameters",
}


def _functions_of(kind: type[nn.Module]) -> dict[str, types.CodeType]:
    """The code of a class's plain methods, except special ones and those of torch's own classes."""
    found = dict[str, types.CodeType]()
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
            if isinstance(function, types.FunctionType) and not (name.startswith("__") and name.endswith("__")):
                found[name] = function.__code__
    return found


def _names_read(name: str, functions: dict[str, types.CodeType]) -> set[str]:
    """The attributes that a method reads, and those that methods with these names read."""
    seen, waiting = set[str](), [name]
    while waiting:
        code = functions.get(waiting.pop())
        if code is not None:
            further = _names_in(code) - seen
            seen |= further
            waiting += further
    return seen


def _names_in(code: types.CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*(_names_in(one) for one in inner))
