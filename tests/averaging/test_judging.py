"""What a judge takes a round to show of the lines of its members."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from peerd.averaging.compression import Compression
from peerd.averaging.exchange import Exchange
from peerd.averaging.judging import Judge
from peerd.averaging.layout import RoundLayout
from peerd.config.codec import parse_averaged
from peerd.policy.round.edges import PastEdges
from peerd.policy.step.roster import WHOLE, Roster, RosterEntry
from peerd.table.record import AverageId, PeerId
from peerd.wire.messages import Beat

PEERS = tuple(PeerId(f"p{number}") for number in range(3))
LENGTH, NUM_CHUNKS, TOOK_S = 6000, 4, 2.0


def judge_of_three(me: int) -> Judge:
    """The first member reduces everything."""
    allowed = parse_averaged("none")
    entries = tuple(RosterEntry(peer, 0, 0, 0) for peer in PEERS)
    roster = Roster(0, 0, 0, PEERS[0], entries, (), (WHOLE, 0, 0), NUM_CHUNKS)
    layout = RoundLayout(roster, LENGTH, Compression(allowed, torch.float32), 3 * [allowed.most_exact])
    exchange = SimpleNamespace(roster=roster, layout=layout, me=me)
    return Judge(cast(Exchange, exchange), averaging_s=1.0, within_s=1.0, past=PastEdges(), now_s=0.0)


@pytest.mark.parametrize("me", [1, 2])
def test_a_judge_that_hears_of_what_others_sent_after_the_end_takes_no_line_for_a_dead_one(me: int) -> None:
    """It was told of nothing, and the sum of everything has come: the leader then expected rounds of 1,000,000 s."""
    judge = judge_of_three(me)
    judge.debts.told_sum(0, me, NUM_CHUNKS, TOOK_S)
    assert judge.rates(TOOK_S) == {}


def test_a_judge_that_was_told_what_others_sent_knows_their_rates() -> None:
    judge = judge_of_three(1)
    judge.told(0, Beat(average_id=AverageId(b"r"), parts=(0, NUM_CHUNKS, NUM_CHUNKS), sums=(NUM_CHUNKS, 0, 0), still_s=0.0), TOOK_S)
    rates = judge.rates(TOOK_S)
    assert {member: rate.rate for member, rate in rates.items() if member} == {1: 4 * LENGTH / TOOK_S, 2: 4 * LENGTH / TOOK_S}
