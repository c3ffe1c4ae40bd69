"""`torch.cuda` over the simulated device, whose events go to a checker.

Importing this module puts the device into the process, for good: see `tests.simulated`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

from tests.simulated import library

library.preload()

import torch  # noqa: E402  (behind the device)

from tests.simulated import graphs  # noqa: E402
from tests.simulated.checker import HOST, Access, Checker  # noqa: E402
from zcompile.runtime import stream_watch  # noqa: E402

DEVICE = torch.device("cuda", 0)
ROOTS = [f"{Path(__file__).parents[2]}/"]
"""Folders whose lines are told."""
MACHINERY = {__file__, str(Path(__file__).with_name("checker.py"))}
"""Files whose lines nobody wants to see."""
MEMORY = 8 << 30


class Kind(IntEnum):
    """Of an event, as in `native/simulated.h`."""

    LAUNCH = 0
    RECORD = 1
    BLOCK = 2
    SYNC_STREAM = 3
    SYNC_EVENT = 4
    SYNC_DEVICE = 5
    ALLOCATE = 6
    FREE = 7
    KEEP = 8
    PIN = 9
    UNPIN = 10
    HOST = 11
    SEEN = 12


class _Access(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64), ("writes", ctypes.c_int32))


class _Event(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("stream", ctypes.c_int64),
        ("id", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("count", ctypes.c_int64),
        ("accesses", ctypes.POINTER(_Access)),
    )


_Heard = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Event))
_native = ctypes.CDLL(str(library.build()["device"]))
for _name in ("simulated_current_stream", "simulated_used", "simulated_peak"):
    getattr(_native, _name).restype = ctypes.c_int64
_native.simulated_elapsed.argtypes = ctypes.c_int64, ctypes.c_int64
_native.simulated_elapsed.restype = ctypes.c_double


class Told:
    """Events as they come, from any thread, one after the other."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self._lock = threading.Lock()
        self._owner = 0
        self._later: deque[Any] = deque()

    def __call__(self, event: Any) -> None:
        told = _copied(event.contents)
        if told[0] is Kind.SEEN and threading.current_thread().name == stream_watch.NAME:
            return  # what that thread learns, those that launch and write do not
        if self._owner == threading.get_ident():  # a tensor has died while the checker ran
            self._later.append(told)
            return
        with self._lock:
            self._owner = threading.get_ident()
            try:
                self._tell(*told)
                while self._later:
                    self._tell(*self._later.popleft())
            finally:
                self._owner = 0

    def _tell(self, kind: Kind, stream: int, number: int, nbytes: int, name: str, accesses: list[Access]) -> None:
        checker = self.checker
        match kind:
            case Kind.LAUNCH:
                checker.launch(stream, name, accesses)
            case Kind.RECORD:
                checker.record(number, stream)
            case Kind.BLOCK:
                checker.block(stream, number)
            case Kind.SYNC_STREAM:
                checker.sync_stream(stream, name)
            case Kind.SYNC_EVENT:
                checker.sync_event(number, name)
            case Kind.SYNC_DEVICE:
                checker.sync_device(name)
            case Kind.ALLOCATE:
                checker.allocate(number, nbytes, stream)
            case Kind.FREE | Kind.UNPIN:
                checker.free(number)
            case Kind.KEEP:
                checker.keep(number, stream)
            case Kind.PIN:
                checker.pin(number, nbytes)
            case Kind.HOST:
                checker.host(name, accesses)
            case Kind.SEEN:
                checker.seen(number)


def _copied(event: Any) -> tuple[Kind, int, int, int, str, list[Access]]:
    accesses = [Access(one.begin, one.end, bool(one.writes)) for one in event.accesses[: event.count]]
    return Kind(event.kind), event.stream, event.id, event.bytes, (event.name or b"").decode(), accesses


def program_line() -> str:
    """The innermost lines of the project and of its programs that this thread runs, innermost first."""
    lines, frame = list[str](), sys._getframe(1)
    while frame is not None and len(lines) < 3:
        name = frame.f_code.co_filename
        root = "" if "/site-packages/" in name or name in MACHINERY else next(filter(name.startswith, ROOTS), "")
        if root or name.startswith("<zcompile"):
            lines.append(f"{name.removeprefix(root)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines) or "a line of another library"


checker = Checker(program_line)
_told = Told(checker)
_heard = _Heard(_told)
_native.simulated_start()
_native.simulated_listen(_heard)
atexit.register(_native.simulated_listen, _Heard())


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Inside, nobody listens: no Python runs but what is measured."""
    _native.simulated_listen(_Heard())
    try:
        yield
    finally:
        _native.simulated_listen(_heard)


# -- torch.cuda --------------------------------------------------------------------------------------------------------

HANDLES = 16
"""Handles of streams are multiples of it: 1 and 2 are the legacy and the per-thread stream's."""


class Stream(torch.Stream):
    """As `torch.cuda.Stream`, of which the CPU build has none."""

    def __new__(cls, device: object = None, priority: int = 0, **given: int) -> Stream:
        return super().__new__(cls, **given) if given else super().__new__(cls, device=DEVICE, priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id * HANDLES

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """As `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, DEVICE, enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, other: torch.Event) -> float:
        return float(_native.simulated_elapsed(self.event_id, other.event_id))


def stream_of(number: int) -> Stream:
    return Stream(stream_id=number, device_index=0, device_type=1)


def current_stream(device: object = None) -> Stream:
    return stream_of(_native.simulated_current_stream())


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    before = torch._C._accelerator_getStream(0)
    torch._C._accelerator_setStream(stream if stream is not None else before)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


class Properties:
    """Of a GPU that is as small as the models of tests."""

    name, total_memory, multi_processor_count = "a simulated device", MEMORY, 132
    major, minor, gcnArchName = 9, 0, ""
    warp_size, regs_per_multiprocessor, max_threads_per_multi_processor = 32, 65536, 2048
    max_threads_per_block, L2_cache_size = 1024, 50 << 20
    shared_memory_per_block_optin, shared_memory_per_multiprocessor = 232448, 233472
    clock_rate, memory_clock_rate, memory_bus_width = 1_980_000, 2_619_000, 5120


def fuse_attention() -> None:
    """Let attention be traced, in this process and from now on, as the kernels of a GPU, which cannot run here."""
    _native.simulated_fuse_attention()


def synchronize() -> None:
    torch._C._accelerator_synchronizeDevice(0)


class SyncDebug:
    """The mode of `torch.cuda.set_sync_debug_mode`.

    The device is heard in a callback, which cannot raise: a wait that is an error is raised where the mode is set next.
    """

    mode, waits = 0, 0

    def get(self) -> int:
        return self.mode

    def set(self, mode: int | str) -> None:
        number = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode
        waited = self.mode == 2 and checker.stream_waits > self.waits
        self.mode, self.waits = number, checker.stream_waits
        if waited:
            raise RuntimeError("called a synchronizing CUDA operation")


def _put_in(module: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(module, name, value)


_sync_debug = SyncDebug()
_generator = torch.ops.simulated.default_generator()


def _gives(value: Any = None) -> Callable[..., Any]:
    """A function of its own each time, as Dynamo has rules by function."""
    return lambda *args, **options: value


def _calls(function: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *args, **options: function()


_put_in(
    torch.cuda,
    Stream=Stream,
    Event=Event,
    ExternalStream=lambda handle, device=None: stream_of(handle // HANDLES),
    current_stream=current_stream,
    default_stream=_calls(lambda: stream_of(0)),
    stream=on_stream,
    set_stream=lambda stream: torch._C._accelerator_setStream(stream),
    synchronize=_calls(synchronize),
    is_available=_gives(True),
    is_initialized=_gives(True),
    is_bf16_supported=_gives(True),
    set_sync_debug_mode=_sync_debug.set,
    get_sync_debug_mode=_sync_debug.get,
    init=_gives(),
    _lazy_init=_gives(),
    _lazy_call=lambda call, **options: call(),
    device_count=_gives(1),
    current_device=_gives(0),
    set_device=_gives(),
    _exchange_device=_gives(0),
    _maybe_exchange_device=_gives(0),
    get_device_properties=_gives(Properties()),
    get_device_name=_gives(Properties.name),
    get_device_capability=_gives((Properties.major, Properties.minor)),
    get_arch_list=_gives(["sm_90"]),
    can_device_access_peer=_gives(False),
    mem_get_info=_calls(lambda: (MEMORY - _native.simulated_used(), MEMORY)),
    memory_allocated=_calls(_native.simulated_used),
    memory_reserved=_calls(_native.simulated_used),
    max_memory_allocated=_calls(_native.simulated_peak),
    max_memory_reserved=_calls(_native.simulated_peak),
    memory_stats=_gives({}),
    reset_peak_memory_stats=_gives(),
    empty_cache=_gives(),
    default_generators=(_generator,),
    get_rng_state=_calls(_generator.get_state),
    set_rng_state=lambda state, device=None: _generator.set_state(state),
    manual_seed=lambda seed: _generator.manual_seed(seed),
    manual_seed_all=lambda seed: _generator.manual_seed(seed),
    initial_seed=_calls(_generator.initial_seed),
)
_put_in(
    torch._C,
    _cuda_isInBadFork=False,
    _cuda_getDevice=_gives(0),
    _cuda_setDevice=_gives(),
    _cuda_exchangeDevice=_gives(0),
    _cuda_maybeExchangeDevice=_gives(0),
    _cuda_getDeviceCount=_gives(1),
    _cuda_getCurrentRawStream=lambda device=0: _native.simulated_current_stream() * HANDLES,
    _cuda_getCurrentStream=lambda device=0: (_native.simulated_current_stream(), 0, 1),
    _cuda_getDefaultStream=_gives((0, 0, 1)),
    _cuda_synchronize=_calls(synchronize),
)
graphs.install(str(library.build()["device"]), DEVICE)


def _resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """The CPU build cannot resize memory of a GPU."""
    if storage.device.type != "cuda":
        return _resize_on_host(storage, nbytes)
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage, 0, (0,), (1,))
        torch.ops.simulated.resize_storage(whole, nbytes)
    return storage


_resize_on_host = torch.UntypedStorage.resize_
torch.UntypedStorage.resize_ = _resize  # type: ignore[assignment]


def _tolist(tensor: torch.Tensor) -> Any:
    """It reads memory past the dispatcher, by which the device sees what the host does."""
    if tensor.device.type == "cpu" and tensor.numel() and type(tensor) is torch.Tensor and tensor.is_pinned():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        begin = tensor.data_ptr()
        checker.host("tolist", [Access(begin, begin + last * tensor.itemsize, writes=False)])
    return _tolist_unseen(tensor)


_tolist_unseen = torch.Tensor.tolist
torch.Tensor.tolist = _tolist  # type: ignore[assignment]

__all__ = ["DEVICE", "HOST", "Checker", "Event", "Stream", "checker"]
