"""CUDA graphs of the simulated device: what `torch.cuda.CUDAGraph` and torch's trees of them want of a CUDA build.

The trees are torch's own code. A graph is captured by running its kernels once, and replayed by running them again on
the same memory, as one launch whose accesses the checker sees.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Address = int
Pool = tuple[int, int]
MANY = 1 << 16


def install(path: str, device: torch.device) -> None:
    """Put them into torch, from the library of the device."""
    native = ctypes.PyDLL(path)  # operations that are run again may come by Python
    _declare(native)
    for name, value in _bindings(native, device).items():
        setattr(torch._C, name, value)
    handles = itertools.count(1)
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = _graph_class(native)  # type: ignore[misc,assignment]
    torch.cuda.graph_pool_handle = torch.cuda.graphs.graph_pool_handle = lambda: (0, next(handles))
    is_capturing = native.simulated_captures
    torch.cuda.is_current_stream_capturing = torch.cuda.graphs.is_current_stream_capturing = lambda: is_capturing()


def _declare(native: ctypes.PyDLL) -> None:
    number, numbers = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    for name, arguments in {
        "pool_begin": [number],
        "pool_release": [number],
        "pool_uses": [number],
        "capture_begin": [number, number],
        "replay": [number],
        "graph_reset": [number],
        "pool_taken": [number, numbers, number],
        "pool_restore": [number, numbers, number, numbers, number],
        "storage_owns": [number],
        "storage_free": [number],
        "storage_forbid": [number, ctypes.c_char_p],
        "free": [number],
    }.items():
        getattr(native, f"simulated_{name}").argtypes = arguments
    native.simulated_pool_taken.restype = native.simulated_pool_uses.restype = ctypes.c_int64
    for name in ("storage_owns", "capture_end", "captures"):
        getattr(native, f"simulated_{name}").restype = ctypes.c_bool


def _graph_class(native: ctypes.PyDLL) -> type:
    numbers, pools = itertools.count(1), itertools.count(1 << 20)

    class CUDAGraph:
        """As `torch.cuda.CUDAGraph`."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._number = next(numbers)
            self._pool: Pool = (0, 0)
            self._ended = False

        def capture_begin(self, pool: Pool | None = None, **options: object) -> None:
            assert pool is None or native.simulated_pool_uses(pool[1]), "use_count > 0"  # as torch's allocator does
            self._pool = pool or (0, next(pools))
            native.simulated_capture_begin(self._number, self._pool[1])

        def capture_end(self) -> None:
            if native.simulated_capture_end():
                raise RuntimeError("CUDA error: capturing stream has unjoined work")
            self._ended = True

        def replay(self) -> None:
            native.simulated_replay(self._number)

        def pool(self) -> Pool:
            if not self._ended:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._pool

        def register_generator_state(self, generator: torch.Generator) -> None:
            """Nothing: what draws in a replay moves its generator on by itself."""

        def reset(self) -> None:
            native.simulated_graph_reset(self._number)

        def __del__(self) -> None:
            self.reset()

    return CUDAGraph


def _bindings(native: ctypes.PyDLL, device: torch.device) -> dict[str, Callable[..., Any]]:
    """What the CPU build of torch lacks, by the names that it has in torch._C."""
    pools = set[Pool]()

    def taken(pool: Pool) -> list[Address]:
        addresses = (ctypes.c_int64 * MANY)()
        count = native.simulated_pool_taken(pool[1], addresses, MANY)
        assert count <= MANY, "a pool has so many tensors at most"
        return addresses[:count]

    def snapshot(*_: object) -> dict[str, list[dict[str, Any]]]:
        blocks = [(pool, address) for pool in pools for address in taken(pool)]
        return {
            "segments": [
                {"segment_pool_id": pool, "address": address, "blocks": [{"state": "active_allocated", "size": 0}]}
                for pool, address in blocks
            ]
        }

    def begin(_: int, pool: Pool) -> None:
        pools.add(pool)
        native.simulated_pool_begin(pool[1])

    def restore(_: int, state: tuple[Pool, list[Address]], stale: Sequence[int], live: Sequence[int]) -> None:
        assert not stale, "torch's trees free what is stale themselves"
        pool, addresses = state
        native.simulated_pool_restore(pool[1], _array(addresses), len(addresses), _array(live), len(live))

    def constructed(metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=metadata["dtype"], device=device)
        return empty.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])

    def at_same_places(tensors: Sequence[Any], addresses: Sequence[Address | None], indices: Sequence[int]) -> bool:
        return all(tensors[index].data_ptr() == addresses[index] for index in indices if addresses[index] is not None)

    return {
        "_host_emptyCache": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: native.simulated_captures(),
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_get_conv_benchmark_empty_cache": lambda: False,
        "_cudnn_set_conv_benchmark_empty_cache": lambda enabled: None,
        "_cuda_beginAllocateCurrentThreadToPool": begin,
        "_cuda_endAllocateToPool": lambda _, pool: native.simulated_pool_end(),
        "_cuda_releasePool": lambda _, pool: native.simulated_pool_release(pool[1]),
        "_cuda_memorySnapshot": snapshot,
        "_cuda_getCheckpointState": lambda _, pool: (pool, taken(pool)),
        "_cuda_setCheckpointPoolState": restore,
        "_cuda_checkPoolLiveAllocations": lambda _, pool, addresses: set(taken(pool)) == set(addresses),
        "_cuda_cudaCachingAllocator_raw_delete": lambda address: native.simulated_free(address),
        "_has_Standard_Deleter": lambda storage: native.simulated_storage_owns(storage),
        "_free_And_Remove_DeleterFn": lambda storage: native.simulated_storage_free(storage),
        "_set_storage_data_ptr_access_error_msg": lambda storage, message: native.simulated_storage_forbid(
            storage, message.encode()
        ),
        "_set_storage_access_error_msg": lambda tensor, message: torch.ops.simulated.forbid(tensor, message),
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": constructed,
        "_tensors_data_ptrs_at_indices_equal": at_same_places,
    }


def _array(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)
