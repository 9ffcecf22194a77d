"""The links of `scripts/bench home --part link`, and how many microbatches hide the filling of the pipeline."""

from __future__ import annotations

import pytest

from peerd.timeline.shares import Shares
from scripts.benchmarks._link import (
    FILL_SHARE,
    LINK_SCENARIOS,
    NUM_PEERS,
    NUM_STAGES,
    PER_STAGE,
    STAND_IN_MS,
    LinkScenario,
    Turn,
    codecs_of,
    manifest_of,
    row_of,
)

ADDRESSES = tuple(f"10.99.0.{number + 1}" for number in range(NUM_PEERS))


@pytest.mark.parametrize("scenario", LINK_SCENARIOS, ids=lambda scenario: scenario.name)
def test_filling_and_emptying_the_pipeline_take_a_twentieth_of_a_step(scenario: LinkScenario) -> None:
    """With raw activations on the slowest link, which is more than what `auto` sends."""
    manifest = manifest_of("auto", scenario.microbatches(manifest_of("auto", 1).boundary_bytes))
    hop_s = max(scenario.one_way_ms) / 1000 + 8e-6 * manifest.boundary_bytes / min(*scenario.up_mbit, *scenario.down_mbit)
    fill_s = (NUM_STAGES - 1) * (STAND_IN_MS / 1000 + 2 * hop_s)
    steady_s = manifest.train.microbatches_per_step / PER_STAGE * STAND_IN_MS / 1000
    assert fill_s <= FILL_SHARE * steady_s < 1.05 * fill_s
    assert manifest.boundary_bytes == 262_144
    assert not manifest.train.microbatches_per_step % NUM_PEERS


@pytest.mark.parametrize("scenario", LINK_SCENARIOS, ids=lambda scenario: scenario.name)
def test_each_pair_has_a_way_in_both_directions_and_each_peer_its_own_rates(scenario: LinkScenario) -> None:
    links = scenario.links(ADDRESSES)
    assert {(way.origin, way.target) for way in links.ways} == {(one, other) for one in ADDRESSES for other in ADDRESSES if one != other}
    assert list(links.rates) == list(ADDRESSES)
    assert [links.rates[address].up for address in ADDRESSES[: len(scenario.up_mbit)]] == list(scenario.up_mbit)
    assert {way.loss for way in links.ways} == {scenario.loss}


@pytest.mark.parametrize("scenario", LINK_SCENARIOS, ids=lambda scenario: scenario.name)
def test_stretched_links_take_so_many_times_as_long_for_the_same_bytes(scenario: LinkScenario) -> None:
    links, longer = scenario.links(ADDRESSES), scenario.stretched(3).links(ADDRESSES)
    assert [3 * rates.up for rates in longer.rates.values()] == pytest.approx([rates.up for rates in links.rates.values()])
    assert [way.delay_ms / 3 for way in longer.ways] == pytest.approx([way.delay_ms for way in links.ways])
    assert [way.loss for way in longer.ways] == [way.loss for way in links.ways]


def test_a_row_says_how_many_links_of_each_boundary_use_which_codec() -> None:
    links = [(0, "activations", "int8"), (0, "activations", "int8"), (1, "activation_gradients", "int6"), (0, "activations", "none")]
    assert codecs_of(links) == ["0>1 int8 x2, none x1", "0<1 fixed", "1>2 fixed", "1<2 int6 x1"]


def test_a_row_tells_what_does_not_hold_of_auto_alone() -> None:
    slow = Turn(step_s=20.0, shares=Shares(compute=0.6, wait=0.1, wire=0.2, step_end=0.1), codecs=[], exchange_s=0.4)
    fast = Turn(step_s=13.0, shares=Shares(compute=0.99, wait=0.01), codecs=[], exchange_s=0.4)
    row = row_of(LINK_SCENARIOS[0], "auto", 444, [slow], [fast])
    assert row.missed == ["0.650 of the speed without limits, not 0.88", "the wire has 20.0% of the critical path, not 8%"]
    assert not row_of(LINK_SCENARIOS[0], "none", 444, [slow], [fast]).missed
