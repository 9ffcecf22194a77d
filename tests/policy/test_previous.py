"""Hole 15: a joiner has the parameters of the step before when it begins to serve, though it hardly ever downloads them."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.step.acts import FetchAverage, FetchPrevious, Serve, Wait
from peerd.policy.step.situation import OwnState
from peerd.table.record import PeerId, Phase
from tests.policy.model_faults import Fault, Kind, Scenario, Survivor
from tests.policy.protocol_model import World
from tests.policy.test_stepping import decided, joiner
from tests.strategies import member


def only_a_joiner_is_left(off: frozenset[str] = frozenset()) -> World:
    """Stage 0 is one step behind, and in the other one a peer joins, begins to serve, and then all its mates die."""
    world = World(Scenario(seed=1, survivor=Survivor.ANY, off=off, last_step=12))
    world.run(until=lambda: min(peer.record.step for peer in world.peers.values()) == 6)
    world.strike(Fault(0, Kind.SLEEP, name="p2", lasts_s=90.0))
    behind, others = world.peers[PeerId("p2")].record.step, [world.peers[PeerId(name)] for name in ("p1", "p3")]
    world.run(until=lambda: max(peer.record.step for peer in others) == behind + 1)
    world.strike(Fault(0, Kind.KILL, name="p0"))
    joins_at = world.now + 3.0  # all hear that the mates have finished the step
    world.run(until=lambda: world.now >= joins_at)
    world.add(PeerId("p9"), 1).join(1)
    world.run(until=lambda: world.peers[PeerId("p9")].record.phase is Phase.ACCUMULATING)
    for name in ("p1", "p3"):
        world.strike(Fault(0, Kind.KILL, name=name))
    world.wake(PeerId("p2"))
    return world


def test_hole_15_a_stage_of_a_joiner_alone_serves_another_stage_that_is_one_step_behind() -> None:
    world = only_a_joiner_is_left()
    outcome = world.run()
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["previous fetched"] == 1


def test_hole_15_if_a_joiner_served_without_the_previous_parameters_the_step_would_be_lost() -> None:
    outcome = only_a_joiner_is_left(frozenset({"wait for previous"})).run()
    assert outcome.counts["inexact"] > 0 or outcome.problems


def test_hole_15_a_joiner_waits_for_the_average_that_gives_it_the_previous_parameters_and_fetches_them_in_a_long_step() -> None:
    """It waits as long as fetching would take."""
    mine, mate = joiner(step=5), member("m", step=5)
    lacks = OwnState(record=mine, lacks_previous=True, previous_s=20.0, lacking_since_s=90.0)
    assert isinstance(decided(mine, mate, now_s=100.0, own=lacks), Wait)
    assert isinstance(decided(mine, mate, now_s=100.0, own=replace(lacks, lacking_since_s=None)), Wait)
    assert decided(mine, mate, now_s=111.0, own=lacks) == FetchPrevious(decided(mine, mate, now_s=111.0, own=lacks).reason, mate.peer, 5)
    assert isinstance(decided(mine, member("m", step=6, kept_averages=1), now_s=111.0, own=lacks), FetchAverage)
    assert isinstance(decided(mine, own=lacks), Serve), "nobody else can give them"
    assert isinstance(decided(mine, mate, own=replace(lacks, lacks_previous=False)), Serve)
