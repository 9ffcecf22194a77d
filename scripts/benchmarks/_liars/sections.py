"""Holds sections of an average that it has made up, once all groups have made their sums, and gives them to its mates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from blake3 import blake3

from peerd.averaging.slices import Signatures
from peerd.daemon.peer import Peer
from peerd.policy.step.certificates import average_id_of
from peerd.policy.step.groups import Levels
from peerd.policy.step.ledger import full
from peerd.policy.step.roster import WHOLE, Roster, entry_of
from peerd.stage.sections import SectionOfAverage
from peerd.stage.state import StageState
from peerd.table.record import Phase
from peerd.wire.tensors import views_of_flat
from scripts.benchmarks._liars._speech import keep_making_up


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    await keep_making_up(peer, _make_up)


def _make_up(peer: Peer, state: StageState, attempt: int) -> bool:
    """Runs on the thread that computes. Returns whether it has made them up."""
    mine, membership = state.record, peer.membership
    num_microbatches, is_in_groups, num_sections = state.averages_by
    members = [mine, *(m for m in membership.live().members(mine.stage, mine.step) if m.peer != mine.peer)]
    levels = Levels(members, peer.place.manifest.swarm.group_size)
    if not (is_in_groups and mine.group and mine.phase is Phase.ACCUMULATING and levels.makes_sections):
        return False
    if mine.sections or not levels.are_exact(full(num_microbatches)):
        return False
    entries = tuple(sorted(entry_of(next((m for m in holders if m is mine), holders[0])) for holders in levels.sums))
    shares = tuple(WHOLE * (entry.peer == mine.peer) for entry in entries)
    signatures = Signatures(mine.peer, membership.identity.sign, lambda *_: True, membership.run)
    for number in range(num_sections):
        roster = Roster(mine.stage, mine.step, attempt, mine.peer, entries, (), shares, 1, section=number, num_sections=num_sections)
        start, end = state.bounds_of(roster)
        made_up = torch.ones(end - start, dtype=state.accumulator.flat.dtype)
        slices = (signatures.signed(roster, blake3(b"".join(views_of_flat(made_up))).digest()),)
        outcome = signatures.confirmed(roster, average_id_of(roster, slices))
        state.take_section(SectionOfAverage(roster, made_up, (), slices, (outcome,)))
    return True
