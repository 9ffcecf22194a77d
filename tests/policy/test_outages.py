"""The outages of the protocol model: it takes away no peer that the run cannot go on without, and only those."""

from __future__ import annotations

import pytest

from peerd.table.record import PeerId, Phase
from tests.policy.model_faults import Scenario
from tests.policy.protocol_model import World


@pytest.mark.parametrize(
    ("target", "steps", "is_needed"),
    [
        ("p0", (3, 3, 2), True),
        ("p0", (3, 2, 3), False),
        ("p0", (2, 3, 2), False),
        ("p2", (2, 3, 3), True),
        ("p1", (2, 3, 2), False),
    ],
)
def test_a_peer_does_not_pause_while_the_other_end_of_a_tied_weight_needs_its_sum(
    target: str, steps: tuple[int, ...], is_needed: bool
) -> None:
    """The peers 0, 1 and 2 serve one stage each. The stages 0 and 2 hold the weight."""
    world = World(Scenario(seed=0, num_stages=3, peers_per_stage=1, ties_stages=True))
    for number, step in enumerate(steps):
        world.peers[PeerId(f"p{number}")].change(tell=False, step=step, phase=Phase.ACCUMULATING)
    assert world.outages.is_needed_for_a_sum(world.peers[PeerId(target)]) is is_needed
