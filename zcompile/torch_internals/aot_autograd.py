"""AOTAutograd: joint graphs, its cache of steps, partitioners."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher  # kernels that can do with sizes that vary
from torch._dynamo.backends.common import aot_autograd  # the frontend's joint graph, mutation and aliasing handled
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache  # raised by what is not to be kept
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import (  # a graph compiled again for other parameters
    TracingContext,
    tracing,
)
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor  # values of traced and of parsed programs

from zcompile.torch_internals.dynamo import name_of_source

__all__ = ["BypassAOTAutogradCache", "aot_autograd", "default_partition", "min_cut_rematerialization_partition"]
"""What is passed on from torch as it is."""


def is_tangent(placeholder: fx.Node) -> bool:
    """True for an input of a joint graph that is the gradient of an output."""
    return isinstance(placeholder.meta.get("desc"), TangentAOTInput)


def tracing_config() -> contextlib.AbstractContextManager[None]:
    """While a graph is traced: how torch's own tracer is set up for programs."""
    options = {
        # Do not promise compilers the memory of saved tensors: we give none away, and the promise would forbid
        # `backward(retain_graph=True)`.
        "donated_buffer": False,
        # The backward casts nothing, as in eager mode, where backwards run outside of autocast. torch would trace it
        # under the autocast of the call, and compute in low precision what the forward has not.
        "backward_pass_autocast": "off",
    }
    # Nothing is computed again in graphs without a backward. torch 2.13 would, by the marks of
    # `torch.utils.checkpoint`, and refuses graphs that draw random numbers.
    if hasattr(functorch_config, remat := "remat_using_tags_for_fwd_loss_bwd_graph"):
        options[remat] = False
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(options)
    return patched


def keepable(compiler: Callable[..., OutputCode]) -> Callable[..., OutputCode]:
    """`compiler`, with AOTAutograd told that it may keep what it gives in its cache."""
    kept: Callable[..., OutputCode] = SerializableAOTDispatchCompiler(OutputCode, compiler)
    return kept


@contextlib.contextmanager
def cached_steps(tag: str) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """While a graph is traced: AOTAutograd's cache keeps entries whole, under keys that include `tag`.

    Gives what everything else that is compiled meanwhile is to run under: torch's configuration as it was.
    """
    config: Any = torch.compiler.config
    own, bundled = config.cache_key_tag, functorch_config.bundled_autograd_cache
    early = functorch_config.force_non_lazy_backward_lowering

    @contextlib.contextmanager
    def outside() -> Iterator[None]:
        usual = functorch_config.patch(bundled_autograd_cache=bundled, force_non_lazy_backward_lowering=early)
        with config.patch(cache_key_tag=own), usual:
            yield

    # An entry is written as soon as the backward is compiled: now, not in the first backward, when this has ended.
    kept = functorch_config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True)
    with config.patch(cache_key_tag=f"{own} {tag}"), kept:
        yield outside


def partitioner_budget(share: float) -> contextlib.AbstractContextManager[None]:
    """While torch compiles: the share of activations that its own partitioner saves, 0 to 1; for comparisons."""
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(activation_memory_budget=share)
    return patched


@contextlib.contextmanager
def partitioning(values: Iterable[Any]) -> Iterator[None]:
    """While torch partitions a graph of these fake values: states of generators are saved like other values.

    On GPUs it would add generators to the inputs of both graphs, which only torch's own runtime wrapper passes.
    Fakes of states are made by what is known of the graph that Dynamo compiles; where it compiles none, torch is told.
    """
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    known = contextlib.nullcontext() if TracingContext.try_get() or mode is None else tracing(TracingContext(mode))
    with known, functorch_config.patch(graphsafe_rng_functionalization=False):
        yield


def kinds_left_undefined(node: Any, results: int | None) -> Sequence[Any] | None:
    """Let the backward of a compiled function have None, not zeros, where no gradient comes to one of its results.

    Returns shape, dtype and device of these; None where that cannot be: they are not as many.
    """
    kinds: Sequence[Any] = node._input_metadata
    if len(kinds) != results:
        return None
    node.set_materialize_grads(False)
    return kinds


def promise_no_donated_buffers() -> None:
    """While a backward is compiled: write down that none was donated. Left out, it counts as some at the next one."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def sequence_number(node: fx.Node) -> int | None:
    """Of an operation of a traced graph: equal in the forward and in what computes its gradient; None if not known."""
    number = node.meta.get("seq_nr", -1)
    return number if number >= 0 else None


def path_of_input(node: fx.Node) -> str:
    """Where a parameter among the inputs of Dynamo's graph hangs in the module tree of the traced code."""
    argument = node.meta.get("grapharg")
    source = "" if argument is None else name_of_source(argument.source)
    return ".".join(re.findall(r"_(?:modules|parameters)\['([^']+)'\]", source)) or str(node.target)


@contextlib.contextmanager
def tracing_again(values: Sequence[Any]) -> Iterator[None]:
    """Trace a graph of these fake values once more, sizes that vary included, as AOTAutograd does."""
    modes = {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_python_dispatcher())
        for mode in modes.values():
            stack.enter_context(mode)
            if mode.shape_env is not None:  # sizes that depend on data get new symbols, which nobody is to bind
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield
