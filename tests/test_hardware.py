"""Profiles of hardware: what collectives take on their levels, and files with mistakes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zcompile import ProfileError
from zcompile.cost.hardware import Hardware, Link, load_profile, parse_profile, profile_text
from zcompile.cost.profile_files import profiles
from zcompile.ir.axis import Axis, AxisKind

NODES = replace(
    Hardware.of(flops=1e12, memory_bandwidth=1e12),
    links=(Link("inside", 1e-6, 100.0, members=8), Link("between", 1e-3, 50.0)),
    device="cuda",
)
"""Nodes of eight ranks; what a node sends to others is half as fast as what a rank sends within it."""


def ranks(size: int, stride: int = 1) -> Axis:
    return Axis("dp", AxisKind.SHARD, size, stride)


def test_within_a_node_only_the_inner_link_counts() -> None:
    assert NODES.collective_seconds(800, ranks(8)) == pytest.approx(3e-6 + 7 / 8 * 800 / 100)


def test_between_nodes_a_node_receives_what_its_ranks_do_not_have() -> None:
    inner, outer = (1 - 1 / 32) * 800 / 100, (1 - 8 / 32) * 800 / 50
    assert NODES.collective_seconds(800, ranks(32)) == pytest.approx(3e-6 + 2e-3 + max(inner, outer))


def test_between_hosts_every_rank_receives_for_itself() -> None:
    hosts = replace(NODES, device="cpu")
    assert hosts.collective_seconds(800, ranks(32)) == pytest.approx(3e-6 + 2e-3 + 8 * (1 - 8 / 32) * 800 / 50)
    assert hosts.collective_seconds(800, ranks(8)) == NODES.collective_seconds(800, ranks(8))
    assert hosts.collective_seconds(800, ranks(4, 8)) == NODES.collective_seconds(800, ranks(4, 8))


def test_groups_across_nodes_share_the_link_of_each() -> None:
    # Four groups of eight, one beside the other: two ranks of each are in a node, and share its link with the others.
    inner, outer = (1 - 1 / 8) * 800 / 100, (1 - 2 / 8) * 800 / (50 / 4)
    assert NODES.collective_seconds(800, ranks(8, 4)) == pytest.approx(1e-6 + 2e-3 + max(inner, outer))
    # One rank of each in a node: nothing is sent within.
    assert NODES.collective_seconds(800, ranks(4, 8)) == pytest.approx(2e-3 + (1 - 1 / 4) * 800 / (50 / 8))


def test_groups_within_a_node_share_no_link() -> None:
    assert NODES.collective_seconds(800, ranks(4, 2)) == pytest.approx(2e-6 + (1 - 1 / 4) * 800 / 100)


def test_every_message_has_its_latency() -> None:
    one, three = (NODES.collective_seconds(800, ranks(2), messages) for messages in (1, 3))
    assert three - one == pytest.approx(2e-6)


def test_alone_nothing_is_sent() -> None:
    assert NODES.collective_seconds(800, ranks(1)) == 0.0
    assert all(NODES.collective_seconds(800, ranks(1, stride)) == 0.0 for stride in (2, 8, 12, 16, 20))


@given(
    st.integers(1, 4096), st.floats(0, 1e12), st.sampled_from([1, 2, 4, 8, 16, 64]), st.sampled_from(["cpu", "cuda"])
)
def test_more_ranks_never_take_less(world: int, payload: float, stride: int, device: str) -> None:
    hardware = replace(NODES, device=device)
    fewer, more = (hardware.collective_seconds(payload, ranks(size, stride)) for size in (world, world + 1))
    assert fewer <= more + 1e-9


def test_the_slowest_link_is_that_of_one_group() -> None:
    assert NODES.slowest() == NODES.links[1]
    assert NODES.slowest(4).bandwidth == 50 / 4
    assert NODES.slowest(32).bandwidth == 50 / 8
    inner = replace(NODES, links=(Link("inside", 0.0, 1.0, members=8), Link("between", 0.0, 50.0)))
    assert (inner.slowest().name, inner.slowest(4).name, inner.slowest(8).name) == ("inside", "inside", "between")


@pytest.mark.parametrize("name", profiles())
def test_profiles_that_come_along_read_and_write(name: str) -> None:
    hardware = load_profile(name)
    assert hardware.source
    assert parse_profile(profile_text(hardware), name) == hardware
    assert hardware.flops_in(torch.float16) > hardware.flops_in(torch.float32)


def test_a_dtype_without_a_rate_has_that_of_float32() -> None:
    assert load_profile("v100-dgx2").flops_in(torch.bfloat16) == load_profile("v100-dgx2").flops["float32"]


def test_infinite_rates_and_texts_survive_the_file() -> None:
    odd = replace(NODES, name='a "name" with \\ and\nlines', memory=math.inf)
    assert parse_profile(profile_text(odd), "odd") == odd


GOOD = profile_text(NODES)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[flops]", "[flops", "bad: is not valid TOML"),
        ("memory_bandwidth = 1e+12\n", "", "bad: has no memory_bandwidth"),
        ("memory_bandwidth = 1e+12", "memory_bandwidth = -1", "bad: has memory_bandwidth = -1"),
        ("memory_bandwidth = 1e+12", 'memory_bandwidth = "fast"', "bad: has memory_bandwidth = 'fast'"),
        ("memory_bandwidth = 1e+12", "memory_bandwidth = nan", "bad: has memory_bandwidth = nan"),
        ("memory_bandwidth", "memory_bandwith", "bad: has 'memory_bandwith', which means nothing"),
        ("float32 = 1e+12\n", "", "bad: has no rate for float32"),
        ("bfloat16", "bfloat61", "bad: has flops of 'bfloat61'"),
        ("float32 = 1e+12", "float32 = 0", "bad: has flops.float32 = 0"),
        ("latency = 1e-06\n", "", "bad: link 1: has no latency"),
        ("latency = 1e-06", "latency = -1.0", "bad: link 1: has latency = -1.0"),
        ("members = 8", "members = 0", "bad: link 'inside' has no members, and is not the last"),
        ("members = 8", "members = 2.5", "bad: link 1: has members = 2.5"),
        ('device = "cuda"', 'device = "tpu"', "bad: has device = 'tpu'"),
        ('name = "unnamed"', "name = 3", "bad: has name = 3"),
    ],
)
def test_a_mistake_in_a_profile_is_named(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ProfileError) as raised:
        parse_profile(GOOD.replace(old, new, 1), "bad")
    assert str(raised.value).startswith(message)


def test_a_profile_without_links_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"has no \[\[links\]\]"):
        parse_profile(GOOD[: GOOD.index("[[links]]")], "bad")


def test_an_unknown_name_and_an_absent_file() -> None:
    with pytest.raises(ProfileError, match=r"h1000: is not a profile.*\n.*did you mean .h100."):
        load_profile("h1000")
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        load_profile(str(Path("nowhere") / "this.toml"))
