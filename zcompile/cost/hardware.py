"""Hardware profiles: the rates of a device and of the network between devices.

Profiles are TOML files. Those that come with zcompile have the rates of data sheets, scaled to what large models reach;
`zcompile doctor` measures a machine and writes its profile. All rates are per second, all sizes in bytes.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from zcompile.cost.profile_files import DTYPES, profiles, text_of
from zcompile.errors import ProfileError, nearest
from zcompile.ir.axis import Axis
from zcompile.runtime.device import CUDA, HOST, KINDS


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network. Its members are ranks, or groups of ranks joined by the lower levels."""

    name: str
    latency: float
    """Seconds before the first byte of a collective between two members (alpha)."""
    bandwidth: float
    """Bytes per second that one member sends (1 / beta)."""
    members: int = 0
    """The number of members; 0 on the last level for as many as there are."""


@dataclass(frozen=True)
class Hardware:
    """The rates of one device and its links."""

    name: str
    flops: Mapping[str, float]
    """Floating-point operations per second of matrix products, by dtype."""
    memory_bandwidth: float
    """Bytes per second between the device and its memory."""
    links: tuple[Link, ...]
    device: str = HOST
    """The type of device, as in `torch.device.type`."""
    memory: float = math.inf
    """Bytes of memory of one device."""
    attention: float = 1.0
    """Share of `flops` that fused attention reaches."""
    elementwise: float = 1.0
    """Share of `memory_bandwidth` that elementwise kernels reach."""
    functions: float = math.inf
    """Elements per second of exp, tanh and the like, if computing them takes longer than reading them."""
    launch: float = 0.0
    """Overhead of each operation, in seconds."""
    sending: float = 0.0
    """Seconds of compute that sending a byte costs, if the processor that computes also moves the bytes."""
    host_bandwidth: float = math.inf
    """Bytes per second from host memory to the device."""
    source: str = ""
    """Where the figures come from."""

    @classmethod
    def of(
        cls, *, flops: float, memory_bandwidth: float, latency: float = 0.0, bandwidth: float = math.inf
    ) -> Hardware:
        """Return a device with the same rate for all dtypes and one link between all ranks."""
        link = Link("between ranks", latency, bandwidth)
        return cls("unnamed", dict.fromkeys(DTYPES, flops), memory_bandwidth, (link,))

    def slowest(self, stride: int = 1) -> Link:
        """Return the slowest link of a group of ranks `stride` apart, with the group's share of its bandwidth."""
        ranks, links = 1, []
        for link in self.links:
            span = ranks * (link.members or math.inf)
            if span > stride:
                links.append(replace(link, bandwidth=link.bandwidth / min(ranks, stride)))
            ranks = ranks * link.members
        return min(links or [self.links[-1]], key=lambda link: link.bandwidth)

    def flops_in(self, dtype: torch.dtype) -> float:
        """Return the rate of matrix products in `dtype`; that of float32 if the profile does not have the dtype."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def collective_seconds(self, payload: float, axis: Axis, messages: int = 1) -> float:
        """Return the seconds of a collective of `payload` bytes over the ranks along `axis`.

        The lower levels join adjacent ranks. Each member of a level receives all data that its own ranks lack: once,
        or, on CPUs, where ranks send to each other individually, once per rank. Levels work concurrently, so the
        slowest counts. A level's latency grows with the logarithm of its members; latencies of all levels add up.

        Args:
            payload: Bytes of the tensors, twice for an all_reduce.
            axis: The axis. The groups of ranks in between, if its stride is more than 1, send at the same time and
                share the links.
            messages: The number of messages in which the payload is sent.
        """
        world, stride = axis.size, axis.stride
        latency = seconds = 0.0
        for link, ranks, joined in self._levels(world * stride):
            members = min(math.ceil(joined * ranks / max(ranks, stride)), world)
            if members == 1:
                continue
            own, sharing = max(ranks // stride, 1), min(ranks, stride)
            latency += link.latency * math.ceil(math.log2(members))
            received = payload * (1 - own / world) * (own if self.device == HOST else 1)
            seconds = max(seconds, received / (link.bandwidth / sharing))
        return messages * latency + seconds

    def message_seconds(self, nbytes: float, axis: Axis) -> float:
        """Return the seconds to send `nbytes` to the next rank along `axis`, while all ranks in between do the same.

        The message crosses the lowest level that joins ranks so far apart.
        """
        for link, ranks, joined in self._levels(axis.size * axis.stride):
            if ranks * joined > axis.stride:
                return link.latency + nbytes / (link.bandwidth / min(ranks, axis.stride))
        return 0.0

    def _levels(self, world: int) -> Iterator[tuple[Link, int, int]]:
        """Yield the links that `world` ranks use, each with the ranks per member and the number of members."""
        ranks = 1
        for link in self.links:
            groups = math.ceil(world / ranks)
            joined = min(link.members or groups, groups)
            if joined > 1:
                yield link, ranks, joined
            ranks *= joined


CPU = replace(
    Hardware.of(flops=50e9, memory_bandwidth=10e9, latency=200e-6, bandwidth=125e6),
    name="a CPU core on 1 Gbit/s",
    source="a guess for any CPU: nothing was measured, so trust relative sizes alone",
)
"""One core and a 1 Gbit/s link, for choices on a CPU that was not measured: only relative sizes matter."""
GPU = replace(
    Hardware.of(flops=100e12, memory_bandwidth=1.5e12, latency=20e-6, bandwidth=25e9),
    name="a GPU on 200 Gbit/s",
    source="a guess for any GPU: nothing was measured, so trust relative sizes alone",
    device=CUDA,
    host_bandwidth=25e9,
)
"""A GPU with a 200 Gbit/s link, likewise."""


def guess_for(device: str) -> Hardware:
    """Return the profile assumed for an unmeasured device of this type."""
    return CPU if device == HOST else GPU


# -- profiles ---------------------------------------------------------------------------------------------------------


def load_profile(name: str) -> Hardware:
    """Load the profile with this name, or from the file at this path.

    Raises:
        ProfileError: it does not exist or cannot be read, or a figure is missing, unknown or not positive.
    """
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text()
        except OSError as error:
            fix = "give the path of a profile that `zcompile doctor --write` has written, or a name"
            raise ProfileError(name, f"cannot be read: {error.strerror}", fix) from error
    elif name in profiles():
        text = text_of(name)
    else:
        raise ProfileError(name, "is not a profile", f"{nearest(name, profiles())}; or give the path of a .toml file")
    return parse_profile(text, name)


def parse_profile(text: str, name: str) -> Hardware:
    """Parse a profile.

    Raises:
        ProfileError: `text` is not TOML, or a figure is missing, unknown or not positive.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(name, f"is not valid TOML: {error}", "fix that line") from error
    links = found.pop("links", None)
    if not isinstance(links, list) or not links:
        raise ProfileError(name, "has no [[links]]", "give at least one, with name, latency and bandwidth")
    checked = tuple(Link(**_checked(link, Link, f"{name}: link {index}")) for index, link in enumerate(links, 1))
    if late := [link.name for link in checked[:-1] if not link.members]:
        raise ProfileError(name, f"link {late[0]!r} has no members, and is not the last", "say how many ranks it joins")
    return Hardware(**_checked({**found, "links": checked}, Hardware, name))


def profile_text(hardware: Hardware) -> str:
    """Return `hardware` as the text of a profile, which `parse_profile` reads."""
    plain = {f.name: getattr(hardware, f.name) for f in fields(Hardware) if f.name not in ("flops", "links")}
    lines = [f"{name} = {_toml(value)}" for name, value in plain.items()]
    lines += ["", "[flops]", *(f"{dtype} = {_toml(rate)}" for dtype, rate in hardware.flops.items())]
    for link in hardware.links:
        lines += ["", "[[links]]", *(f"{f.name} = {_toml(getattr(link, f.name))}" for f in fields(Link))]
    return "\n".join(lines) + "\n"


def _checked(found: Any, kind: type[Any], where: str) -> dict[str, Any]:
    """Return `found`, checked to be the keyword arguments of `kind`."""
    if not isinstance(found, dict):
        raise ProfileError(where, f"is {found!r}", "give a table of figures")
    known = {f.name: f for f in fields(kind)}
    for key in found:
        if key not in known:
            raise ProfileError(where, f"has {key!r}, which means nothing", nearest(key, list(known)))
    for key, field in known.items():
        if key not in found and field.default is MISSING:
            raise ProfileError(where, f"has no {key}", f"add a line: {key} = ...")
        _check_figure(key, found.get(key, field.default), where)
    return found


def _check_figure(key: str, value: Any, where: str) -> None:
    """Raise ProfileError for an invalid figure."""
    if key == "flops":
        if not isinstance(value, dict) or "float32" not in value:
            raise ProfileError(where, "has no rate for float32", "add a table: [flops], and in it float32 = ...")
        for dtype, rate in value.items():
            if dtype not in DTYPES:
                raise ProfileError(where, f"has flops of {dtype!r}", nearest(dtype, DTYPES))
            _check_positive(f"flops.{dtype}", rate, where)
    elif key == "device":
        if value not in KINDS:
            raise ProfileError(where, f"has device = {value!r}", f"choose {' or '.join(map(repr, KINDS))}")
    elif key in ("name", "source"):
        if not isinstance(value, str):
            raise ProfileError(where, f"has {key} = {value!r}", "give a text")
    elif key in ("members", "launch", "latency", "sending"):
        _check_positive(key, value, where, least=0)
        if key == "members" and value != int(value):
            raise ProfileError(where, f"has members = {value!r}", "give a whole number")
    elif key != "links":
        _check_positive(key, value, where)


def _check_positive(key: str, value: Any, where: str, least: float = 1e-300) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        fix = "give a positive figure" if least else "give a figure of 0 or more"
        raise ProfileError(where, f"has {key} = {value!r}", fix)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)
