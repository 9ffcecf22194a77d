"""The simulated cost of gossip is bounded by the near stages, not by the size of the swarm, and the table stays fresh enough."""

from __future__ import annotations

import pytest

from scripts.benchmarks._gossip import GossipScenario, GossipSimulation


@pytest.mark.parametrize(("num_peers", "num_stages", "step_s"), [(20, 4, 0.0), (60, 12, 30.0), (160, 16, 0.0)])
def test_news_reach_all_they_concern_before_anybody_counts_as_dead(num_peers: int, num_stages: int, step_s: float) -> None:
    swarm = GossipScenario(num_peers=num_peers, num_stages=num_stages, step_s=step_s, microbatches=0)
    cost = GossipSimulation(swarm).run(40.0)
    assert cost.too_late == 0
    assert cost.risen > 0.7 * cost.announced * cost.known  # the latest are still on their way
    assert max(cost.delays_s) < 3 * swarm.period_s * cost.periods


def test_a_peer_of_a_large_swarm_knows_its_neighbourhood_and_the_speakers() -> None:
    cost = GossipSimulation(GossipScenario(num_peers=320, num_stages=32)).run(2.0)
    assert 20 < cost.known < 30 + 3 * 32


@pytest.mark.slow
def test_a_stage_of_a_large_swarm_knows_soon_that_nothing_is_missing() -> None:
    """The rounds of its groups wait for that. A peer announces itself every 30 s; with 300 mates every 150."""
    cost = GossipSimulation(GossipScenario(num_peers=132, num_stages=1, step_s=60.0, in_groups=True)).run(60.0)
    assert len(cost.whole_s) == 132
    assert max(cost.whole_s) < 25.0
