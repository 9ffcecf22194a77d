"""What a peer believes of averages before it downloads them, and how it treats mates that lie about them: rule 18 (certify), hole 53."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peerd.averaging.absences import Absences
from peerd.errors import BadMessageError, HopelessError, RemoteError, UnbelievedError
from peerd.policy.step.roster import Roster, RosterEntry, entry_of
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.step.believing import Belief
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

RULES = StepRules(num_stages=1, num_microbatches=3, ttl_s=3.0, averaging_s=1.5, certifies=True)
MINE, MATE, LIAR = (
    PeerRecord(peer=PeerId(name), phase=Phase.ACCUMULATING, done=1 << number, ledger_no=1)
    for number, name in enumerate(("me", "mate", "the liar"))
)
ALL = Roster(0, 0, 7, LIAR.peer, tuple(sorted(map(entry_of, (MINE, MATE, LIAR)))))
WITH_MATE = Roster(0, 0, 7, LIAR.peer, tuple(sorted(map(entry_of, (MATE, LIAR)))))
ITSELF = Roster(0, 0, 7, LIAR.peer, (RosterEntry(LIAR.peer, 0, 1, 0b111),))


def heard(
    of: Roster, joined: tuple[AverageId, ...] = (), holds: AverageId | None = None, rules: StepRules = RULES
) -> type[RemoteError] | None:
    """What comes of the header of an average with this roster. `holds`: what the mate says that it holds."""
    mate = MATE if holds is None else replace(MATE, phase=Phase.AVERAGED, average_id=holds)
    live = LiveView(me=MINE.peer, records=(MINE, mate, replace(LIAR, phase=Phase.AVERAGED, average_id=of.average_id)))
    membership: Any = SimpleNamespace(contradictions=SimpleNamespace(refuted={}), live=lambda: live)
    state: Any = SimpleNamespace(record=MINE)
    rounds: Any = SimpleNamespace(joined=dict.fromkeys(joined, ()))
    try:
        Belief(state, membership, rounds, rules).by_header(LIAR.peer)(of, of.average_id)
    except RemoteError as error:
        return type(error)
    return None


def test_hole_53_a_lie_shows_in_the_header_of_an_average() -> None:
    assert heard(ALL) is BadMessageError
    assert heard(ITSELF) is HopelessError
    assert heard(WITH_MATE) is UnbelievedError
    assert heard(ALL, joined=(ALL.average_id,)) is None
    assert heard(ITSELF, holds=ITSELF.average_id) is None
    assert heard(ALL, rules=replace(RULES, certifies=False)) is None


@pytest.mark.parametrize(("mate", "is_counted"), [(MATE, True), (replace(MATE, phase=Phase.AVERAGING), False)])
def test_hole_56_a_mate_that_keeps_its_average_back_counts_while_nobody_is_in_a_round(mate: PeerRecord, is_counted: bool) -> None:
    liar = replace(LIAR, phase=Phase.AVERAGED, average_id=ITSELF.average_id)
    live, absences = LiveView(me=MINE.peer, records=(MINE, mate, liar)), Absences(MINE.peer, averaging_s=1.5)
    membership: Any = SimpleNamespace(contradictions=SimpleNamespace(refuted={}), live=lambda: live, wake=lambda: None)
    state: Any = SimpleNamespace(record=MINE, average=None)
    rounds: Any = SimpleNamespace(joined={}, absences=absences)
    belief = Belief(state, membership, rounds, RULES)
    for _ in range(2):
        belief.kept_back(LIAR.peer)
    assert absences.sidelining.peers == ((LIAR.peer,) if is_counted else ())


@pytest.mark.parametrize("is_doubted", [False, True])
def test_hole_53_a_mate_that_is_banned_for_a_lie_is_left_out_though_it_is_doubted_too(is_doubted: bool) -> None:
    far = replace(LIAR, peer=PeerId("another liar, of another stage"), stage=1)
    records, doubted = ((MINE, MATE), (LIAR, far)) if is_doubted else ((MINE, MATE, LIAR, far), ())
    live, absences = LiveView(me=MINE.peer, records=records, suspected=doubted), Absences(MINE.peer, averaging_s=1.5)
    now = Situation(OwnState(record=MINE), live, 1.0, RULES)
    assert absences.look(now, {LIAR.peer: 24.0, far.peer: 24.0})
    assert absences.sidelining.peers == (LIAR.peer,)
