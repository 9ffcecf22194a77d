"""How rosters are drawn, and what members of a round sign of it, whatever peers say in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from peerd.policy.step.certificates import SignedSlice
from peerd.policy.step.confirming import RoundOutcomes, SignedOutcome
from peerd.policy.step.roster import WHOLE, Credit, Roster, entry_of
from peerd.table.record import AverageId
from tests.policy.fuzz_records import TTL_S, World


def roster(world: World) -> Roster:
    """A round among some live peers of a stage."""
    random, stage = world.random, world.random.choice((world.own.stage, world.some_stage()))
    peers = world.live.of_stage(stage)
    members = sorted(random.sample(peers, random.randint(0, min(9, len(peers)))), key=lambda m: m.peer)
    shares = world.many(lambda: random.choice((0, 1, WHOLE // max(1, len(members)), WHOLE, world.count())))
    codecs = random.choice(((), ("int8",), len(members) * ("none",)))
    num_chunks, expected_s = random.choice((0, 1, 7, world.count())), random.choice((0.0, -1.0, 5e-324, 1e300, math.inf, math.nan))
    entries = tuple(entry_of(m) for m in members)
    of_groups = tuple(world.many(lambda: Credit(world.some_peer(), world.ledger())))
    sections = (
        random.choice((0, 1, world.count())),
        random.choice((1, 2, 16, world.count())),
        random.random() < 0.5,
        random.choice(((), (AverageId(world.raw(16)),))),
    )
    return Roster(stage, world.some_step(), 0, world.some_peer(), entries, codecs, shares, num_chunks, expected_s, of_groups, *sections)


def _slices(world: World) -> tuple[SignedSlice, ...]:
    return world.many(lambda: SignedSlice(world.some_peer(), world.raw(16), world.raw(64)))


def _outcome(world: World) -> SignedOutcome:
    return SignedOutcome(world.some_peer(), AverageId(world.raw(16)), world.raw(64), world.random.choice(((), _slices(world))))


def _outcomes(world: World) -> RoundOutcomes:
    found = RoundOutcomes(roster(world), 0.6 * TTL_S)
    for outcome in world.many(lambda: _outcome(world)):
        found.hear(outcome, 0.0)
    if world.random.random() < 0.5:
        found.hold(_outcome(world), 0.0)
    return found


MAKERS: Mapping[type, Callable[[World], Any]] = {
    Roster: roster,
    SignedSlice: lambda w: SignedSlice(w.some_peer(), w.raw(32), w.raw(64)),
    RoundOutcomes: _outcomes,
}

ARGUMENTS: Mapping[str | tuple[str, str], Callable[[World], Any]] = {
    "roster": roster,
    "slices": _slices,
    **dict.fromkeys((("one", "Sequence[SignedSlice]"), ("other", "Sequence[SignedSlice]")), _slices),
    "confirmed_by": lambda w: [w.some_peer() for _ in range(w.random.randrange(300))],
    ("member", "PeerId"): World.some_peer,
    "outcome": _outcome,
    "rank": lambda w: w.random.randrange(3),
    "ids": lambda w: w.many(lambda: AverageId(w.raw(16))),
}
