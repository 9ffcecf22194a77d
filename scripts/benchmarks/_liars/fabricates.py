"""Holds an average that it has made up, of all members' present ledgers, as soon as nothing is missing, and gives it to its mates.

With `hoards` the average names no mate, and it answers nobody that asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from blake3 import blake3

from peerd.averaging.kept import KeptAverages
from peerd.daemon.peer import Peer
from peerd.policy.step.certificates import SignedSlice
from peerd.policy.step.ledger import full
from peerd.policy.step.roster import WHOLE, Roster, entry_of, why_inexact
from peerd.stage.state import StageState
from peerd.table.record import Phase
from peerd.wire.tensors import views_of_flat
from scripts.benchmarks._liars._speech import keep_making_up


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    hoards = bool(arguments.get("hoards"))
    if hoards:
        setattr(KeptAverages, "get_average", _never)  # noqa: B010 - the class is another room's
    await keep_making_up(peer, partial(_make_up, hoards=hoards))


async def _never(*_arguments: Any) -> None:
    await asyncio.Event().wait()


def _make_up(peer: Peer, state: StageState, attempt: int, *, hoards: bool) -> bool:
    """Runs on the thread that computes. Returns whether it has made one up."""
    mine, membership = state.record, peer.membership
    members = [mine, *(m for m in membership.live().members(mine.stage, mine.step) if m.peer != mine.peer)]
    entries = tuple(sorted(map(entry_of, members)))
    if mine.phase is not Phase.ACCUMULATING or why_inexact(entries, state.num_microbatches):
        return False
    shares = tuple(WHOLE * (entry.peer == mine.peer) for entry in entries)
    roster = Roster(mine.stage, mine.step, attempt, mine.peer, entries, (), shares, 1)
    made_up = state.contribution(roster) + 1.0
    if hoards:
        alone = replace(entry_of(mine), done=full(state.num_microbatches))
        roster = replace(roster, entries=(alone,), shares=(WHOLE,))
    root = blake3(b"".join(views_of_flat(made_up))).digest()
    bare = SignedSlice(mine.peer, root, b"")
    signed = replace(bare, signature=membership.identity.sign(bare.statement(membership.run, roster.average_id)))
    state.take_average(roster, made_up, slices=(signed,) if state.certifies else ())
    return True
