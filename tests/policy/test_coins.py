"""Rule 20 (audit): an auditor is committed to its coins before the step, so it cannot choose afterwards whom it audits."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.step.coins import MOST_PEERS, MOST_PERIODS, PERIOD, Commitments, head_behind, heads_of, secret_of
from peerd.table.record import COIN_BYTES, PeerId, PeerRecord

SEED, OTHER = b"seed", b"other seed"


def shown(step: int, seed: bytes = SEED, peer: str = "a") -> PeerRecord:
    return PeerRecord(peer=PeerId(peer), step=step, coins=heads_of(seed, step))


def test_the_secret_of_each_step_leads_to_the_head_of_its_period_and_to_no_other_step() -> None:
    for period in (0, 3):
        head = heads_of(SEED, period * PERIOD)[:COIN_BYTES]
        assert heads_of(SEED, (period - 1) * PERIOD)[COIN_BYTES:] == head or period == 0
        for number in (0, 1, PERIOD // 2, PERIOD - 1):
            step = period * PERIOD + number
            secret = secret_of(SEED, step)
            assert head_behind(secret, step) == head
            assert head_behind(secret, step + 1) != head
            assert heads_of(SEED, step)[:COIN_BYTES] == head
    assert len({secret_of(SEED, step) for step in range(3 * PERIOD)}) == 3 * PERIOD


def test_a_secret_counts_only_by_a_head_that_was_known_before_the_step() -> None:
    known = Commitments()
    known.note(shown(5), 5)
    assert known.has_committed(PeerId("a"), secret_of(SEED, 6), 6)
    assert known.has_committed(PeerId("a"), secret_of(SEED, PERIOD + 1), PERIOD + 1)
    assert not known.has_committed(PeerId("a"), secret_of(SEED, 5), 5), "it may have chosen its seed when the work was done"
    assert not known.has_committed(PeerId("b"), secret_of(SEED, 6), 6)
    assert not known.has_committed(PeerId("a"), secret_of(OTHER, 6), 6)
    assert not known.has_committed(PeerId("a"), secret_of(SEED, 2 * PERIOD), 2 * PERIOD)
    assert not known.has_committed(PeerId("a"), b"", 6)


def test_the_founders_show_their_heads_in_the_first_step() -> None:
    known = Commitments()
    known.note(shown(0), 0)
    assert known.has_committed(PeerId("a"), secret_of(SEED, 0), 0)


def test_the_first_head_of_a_period_counts_and_a_restart_shows_the_same() -> None:
    known = Commitments()
    known.note(shown(5), 5)
    known.note(shown(6, OTHER), 6)
    known.note(shown(7), 7)
    assert known.has_committed(PeerId("a"), secret_of(SEED, 6), 6)
    assert not known.has_committed(PeerId("a"), secret_of(OTHER, 8), 8)


def test_what_a_peer_shows_takes_bounded_room_and_nobody_elses() -> None:
    known = Commitments()
    known.note(shown(5), 5)
    known.note(replace(shown(5, peer="b"), coins=b"short"), 5)
    for number in range(10 * MOST_PERIODS):
        known.note(shown(number * PERIOD, OTHER, "liar"), 5)
    assert known.has_committed(PeerId("a"), secret_of(SEED, 6), 6)
    assert sum(map(len, known._heads.values())) <= 2 + MOST_PERIODS
    for number in range(MOST_PEERS):
        known.note(replace(shown(5), peer=PeerId(f"other {number}")), 5)
    assert len(known._heads) == MOST_PEERS
