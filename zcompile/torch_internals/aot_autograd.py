"""AOTAutograd: joint graphs, its cache of steps, partitioners."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher  # kernels that support dynamic sizes
from torch._dynamo.backends.common import aot_autograd  # makes joint graphs; handles mutation and aliasing
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache  # raised for uncacheable results
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import (  # to compile a graph again for other parameters
    TracingContext,
    tracing,
)
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor  # values of traced and parsed programs

from zcompile.torch_internals.dynamo import name_of_source

__all__ = ["BypassAOTAutogradCache", "aot_autograd", "default_partition", "min_cut_rematerialization_partition"]
"""Names re-exported unchanged from torch."""


def is_tangent(placeholder: fx.Node) -> bool:
    """True for an input of a joint graph that is a gradient of an output."""
    return isinstance(placeholder.meta.get("desc"), TangentAOTInput)


def tracing_config() -> contextlib.AbstractContextManager[None]:
    """The configuration of torch for tracing a program."""
    options = {
        # Do not let compilers reuse the memory of saved tensors: it would break `backward(retain_graph=True)`.
        "donated_buffer": False,
        # Backwards run outside of autocast, as in eager mode. torch would trace the backward under the autocast of the
        # call, and compute in low precision what the forward computed in float32.
        "backward_pass_autocast": "off",
    }
    # Do not recompute in graphs without a backward. torch 2.13 would, by the tags of `torch.utils.checkpoint`, and
    # refuses graphs that draw random numbers.
    if hasattr(functorch_config, remat := "remat_using_tags_for_fwd_loss_bwd_graph"):
        options[remat] = False
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(options)
    return patched


def keepable(compiler: Callable[..., OutputCode]) -> Callable[..., OutputCode]:
    """Mark the results of `compiler` as serializable, so that AOTAutograd may cache them."""
    kept: Callable[..., OutputCode] = SerializableAOTDispatchCompiler(OutputCode, compiler)
    return kept


@contextlib.contextmanager
def cached_steps(tag: str) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """While a graph is traced: let AOTAutograd's cache store bundled entries, with `tag` in their keys.

    Yields a context manager that restores torch's previous configuration, for anything else compiled meanwhile.
    """
    config: Any = torch.compiler.config
    own, bundled = config.cache_key_tag, functorch_config.bundled_autograd_cache
    early = functorch_config.force_non_lazy_backward_lowering

    @contextlib.contextmanager
    def outside() -> Iterator[None]:
        usual = functorch_config.patch(bundled_autograd_cache=bundled, force_non_lazy_backward_lowering=early)
        with config.patch(cache_key_tag=own), usual:
            yield

    # An entry is written when the backward is compiled. Compile it now: the first backward is outside of this context.
    kept = functorch_config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True)
    with config.patch(cache_key_tag=f"{own} {tag}"), kept:
        yield outside


def partitioner_budget(share: float) -> contextlib.AbstractContextManager[None]:
    """Set the share (0 to 1) of activations that torch's own partitioner saves; for comparisons."""
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(activation_memory_budget=share)
    return patched


@contextlib.contextmanager
def partitioning(values: Iterable[Any]) -> Iterator[None]:
    """While torch partitions a graph of these fake values: save generator states like other values.

    On GPUs torch would add generators to the inputs of both graphs, which only its own runtime wrapper passes. Fake
    states need a tracing context: Dynamo's, or one made here if Dynamo is not compiling.
    """
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    known = contextlib.nullcontext() if TracingContext.try_get() or mode is None else tracing(TracingContext(mode))
    with known, functorch_config.patch(graphsafe_rng_functionalization=False):
        yield


def kinds_left_undefined(node: Any, results: int | None) -> Sequence[Any] | None:
    """Let the backward of a compiled function receive None, not zeros, for results without a gradient.

    Returns the metadata (shape, dtype, device) of its results; None, and no change, if they are not `results` many.
    """
    kinds: Sequence[Any] = node._input_metadata
    if len(kinds) != results:
        return None
    node.set_materialize_grads(False)
    return kinds


def promise_no_donated_buffers() -> None:
    """While a backward is compiled: record that no buffer is donated. Without a record, torch assumes that some are."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def sequence_number(node: fx.Node) -> int | None:
    """A number shared by a traced forward operation and the operations of its gradient; None if unknown."""
    number = node.meta.get("seq_nr", -1)
    return number if number >= 0 else None


def path_of_input(node: fx.Node) -> str:
    """The path, in the module tree of the traced code, of a parameter that is an input of Dynamo's graph."""
    argument = node.meta.get("grapharg")
    source = "" if argument is None else name_of_source(argument.source)
    return ".".join(re.findall(r"_(?:modules|parameters)\['([^']+)'\]", source)) or str(node.target)


@contextlib.contextmanager
def tracing_again(values: Sequence[Any]) -> Iterator[None]:
    """For tracing a graph of these fake values again, dynamic sizes included, as AOTAutograd does."""
    modes = {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_python_dispatcher())
        for mode in modes.values():
            stack.enter_context(mode)
            if mode.shape_env is not None:  # data-dependent sizes get fresh symbols, which must not be bound
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield
