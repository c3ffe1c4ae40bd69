"""What predictions count with: the rates of a device and its links, in a few words each."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zcompile.cost.hardware import Hardware
from zcompile.report.axes import decimal_bytes, human_seconds

_FLOPS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"))


def rates(hardware: Hardware) -> Iterator[str]:
    """Matrix products by dtype, the memory, and each link."""
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in hardware.flops.items():
        by_rate.setdefault(rate, []).append(dtype)
    for rate, dtypes in by_rate.items():
        yield f"{_flops(rate)} in {' and '.join(dtypes) if len(dtypes) < 3 else 'every dtype'}"
    yield f"memory {decimal_bytes(hardware.memory_bandwidth)}/s"
    for link in hardware.links:
        joined = f" ({link.members:.0f} ranks)" if link.members else ""
        fast = f"{decimal_bytes(link.bandwidth)}/s" if math.isfinite(link.bandwidth) else "without limit"
        yield f"{link.name}{joined} {fast}, {human_seconds(link.latency)} latency"


def _flops(rate: float) -> str:
    factor, unit = next((one for one in _FLOPS if rate >= one[0]), _FLOPS[-1])
    return f"{rate / factor:.3g} {unit}"
