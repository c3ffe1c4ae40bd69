"""The network between two ranks: loopback, or two network namespaces joined by a cable of a given rate.

A cable is a veth pair with a token bucket at both ends. It needs Linux, `ip`, `tc`, and the right to use them (root);
what is set up is taken down again, whatever ends the `with`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BURST, LATENCY = "256kb", "50ms"  # of the token bucket: what passes at once, how long a packet may queue


class LinkError(RuntimeError):
    """A link cannot be set up on this machine; the message says why and how to fix it."""


@dataclass(frozen=True)
class Link:
    """A kind of network."""

    name: str
    rate: str | None
    """What each direction is limited to, as `tc` writes it; None is loopback."""


@dataclass(frozen=True)
class End:
    """Where one rank lives."""

    prefix: tuple[str, ...]
    """What starts a command there."""
    interface: str
    address: str


LINKS = {link.name: link for link in (Link("loopback", None), Link("1gbit", "1gbit"), Link("250mbit", "250mbit"))}
LOOPBACK = End((), "lo", "127.0.0.1")


@contextmanager
def opened(link: Link) -> Iterator[tuple[End, End]]:
    """The two ends of `link`, for the length of a `with`.

    Raises:
        LinkError: This machine cannot limit a network; loopback always works.
    """
    if link.rate is None:
        yield LOOPBACK, LOOPBACK
        return
    refuse_without_tools(("ip", "tc"))
    names = [f"zc{os.getpid()}{side}" for side in "ab"]
    try:
        yield lay_cable(names[0], names[1], link.rate)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def refuse_without_tools(tools: tuple[str, ...]) -> None:
    """Raise `LinkError` where one of the commands is missing."""
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise LinkError(f"{' and '.join(missing)} not found: install iproute2")


def lay_cable(first: str, second: str, rate: str) -> tuple[End, End]:
    """Two namespaces and a veth pair between them, both named after their ends."""
    for name in (first, second):
        run("ip", "netns", "add", name)
    run("ip", "link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
    ends = (end(first, "10.77.0.1"), end(second, "10.77.0.2"))
    for one in ends:
        run("ip", "-netns", one.interface, "address", "add", f"{one.address}/24", "dev", one.interface)
        run("ip", "-netns", one.interface, "link", "set", "lo", "up")
        run("ip", "-netns", one.interface, "link", "set", one.interface, "up")
        bucket = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
        run("tc", "-netns", one.interface, "qdisc", "replace", "dev", one.interface, "root", *bucket)
    return ends


def end(name: str, address: str) -> End:
    return End(("ip", "netns", "exec", name), name, address)


def run(*command: str) -> None:
    """Run a command that changes the network."""
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        said = found.stderr.strip() or f"exit status {found.returncode}"
        raise LinkError(f"`{' '.join(command)}` failed ({said}): run as root, in a kernel with veth and tbf")
