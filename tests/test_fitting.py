"""Profiles of this machine: rates that are fitted to regions, and what ranks measure."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.models import batch, make
from tests.ranks import Ranks
from zcompile.cost.hardware import Hardware, parse_profile, profile_text
from zcompile.cost.roofline import region_seconds
from zcompile.engine import calibration
from zcompile.engine.calibration import Sizes, survey
from zcompile.runtime.groups import Communicator
from zcompile.tools.doctor import Observation, Reference, fit, observe
from zcompile.tools.gpt import GPTShape

GUESS = replace(Hardware.of(flops=1e11, memory_bandwidth=2e10), functions=1e9, launch=1e-6)
TRUTH = replace(GUESS, flops=dict.fromkeys(GUESS.flops, 4e10), elementwise=0.5, attention=0.6, functions=3e8)


@pytest.mark.slow
def test_rates_are_found_with_which_regions_take_what_they_took() -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    compiled(*batch("gpt", 0, 0)).backward()
    regions = compiled.programs[0].regions.values()
    found = fit(GUESS, [Observation(region, region_seconds(region, TRUTH), 2) for region in regions])
    for region in regions:
        if (wanted := region_seconds(region, TRUTH)) > 1e-6:
            assert region_seconds(region, found) == pytest.approx(wanted, rel=0.1)


def test_rates_stay_within_reach_of_what_was_measured() -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    compiled(*batch("mlp", 0, 0)).backward()
    observations = [Observation(region, 1e6, 1) for region in compiled.programs[0].regions.values()]
    assert fit(GUESS, observations).flops["float32"] >= GUESS.flops["float32"] / 8.001


@pytest.mark.slow
def test_regions_of_a_reference_are_seen_with_their_times() -> None:
    zcompile.compile(make("mlp"), backend="eager")  # which makes a group, where there is none
    mesh = init_device_mesh("cpu", (1,))
    seen = observe(mesh, Reference(GPTShape(2, 64, 1), batch=2, length=16, vocabulary=64), backend="eager")
    assert all(one.seconds > 0 for one in seen)
    assert {one.times for one in seen} >= {1, 2}


def measured(rank: int) -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with mock.patch.object(calibration, "MUCH", (Sizes(64, 2**16, 2**16),) * 2):
        return profile_text(survey(Communicator(mesh, torch.device("cpu")), "here"))


@pytest.mark.parametrize("world", [1, 3])
def test_a_survey_is_a_profile(ranks: Ranks, world: int) -> None:
    for text in ranks.run(world, measured):
        found = parse_profile(text, "here")
        assert all(rate > 0 for rate in found.flops.values())
        assert found.memory_bandwidth > 0
        assert (found.links[0].bandwidth == math.inf) is (world == 1)
        assert found.sending >= 0
