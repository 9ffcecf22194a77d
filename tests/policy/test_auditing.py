"""Rule 20 (audit): which work a peer computes again, and when two results differ."""

from __future__ import annotations

import math

import pytest

from peerd.policy.step.auditing import (
    MOST_TOLERANCE,
    NEWCOMER_STEPS,
    SETTLED_STEPS,
    AuditWord,
    DeviceKind,
    Item,
    Precision,
    Rates,
    chance,
    coin,
    due,
    most_audits,
    tolerance,
    was_due,
)
from peerd.table.record import PeerId

FLOAT32, BFLOAT16 = DeviceKind("cpu", Precision.FLOAT32), DeviceKind("cuda", Precision.BFLOAT16)


def item(index: int | None = 0, audited: str = "b", signed: bytes = b"root") -> Item:
    return Item(PeerId(audited), 1, 7, index, signed)


def test_the_id_of_an_item_covers_the_work_and_what_was_signed_of_it() -> None:
    items = [item(), item(1), item(None), item(audited="c"), item(signed=b"other")]
    assert len({each.id for each in items}) == len(items)
    assert item().id == item().id


def test_coins_draw_as_often_as_the_chance_says_and_nobody_tells_them_without_the_secret() -> None:
    items = [item(number) for number in range(20_000)]
    drawn = [each.index for each in items if coin(b"secret", each) < 0.02]
    assert len(drawn) == pytest.approx(400, abs=80)
    others = [each.index for each in items if coin(b"another", each) < 0.02]
    assert len(set(drawn) & set(others)) < 30


def test_an_auditor_can_show_that_an_audit_was_due_and_no_other_one() -> None:
    found = due(b"secret", [(item(number), 0.02) for number in range(500)])
    assert found
    for number in range(500):
        is_drawn = coin(b"secret", item(number)) < 0.02
        assert was_due(b"secret", item(number), 0.02) or not is_drawn
    assert not was_due(b"another secret", found[0], 0.02)
    far = max((item(number) for number in range(500)), key=lambda each: coin(b"secret", each))
    assert not was_due(b"secret", far, 0.25)


def test_what_the_audited_peer_signs_changes_the_coin_so_nobody_can_choose_a_secret_for_a_victim() -> None:
    secret = next(b"%d" % number for number in range(10_000) if coin(b"%d" % number, item(signed=b"guessed")) < 0.01)
    hits = sum(coin(secret, item(signed=b"%d" % number)) < 0.01 for number in range(2_000))
    assert hits < 60


def test_a_peer_audits_no_more_than_fair_coins_bring() -> None:
    assert most_audits(0.0) == 1
    assert len(due(b"secret", [(item(number), 1.0) for number in range(50)])) == 50
    for seed in range(200):
        drawn = due(b"%d" % seed, [(item(number), 0.02) for number in range(300)])
        assert len(drawn) <= most_audits(6.0) == 15


@pytest.mark.parametrize(
    ("clean_steps", "is_odd", "is_watched", "rate"),
    [
        (0, False, False, 0.25),
        (NEWCOMER_STEPS - 1, True, False, 0.5),
        (NEWCOMER_STEPS, False, False, 0.025),
        (NEWCOMER_STEPS, True, False, 0.5),
        (SETTLED_STEPS, False, False, 0.025),
        (SETTLED_STEPS, True, False, 0.5),
        (SETTLED_STEPS, False, True, 0.25),
    ],
)
def test_newcomers_and_those_in_dispute_are_looked_at_closely(clean_steps: int, is_odd: bool, is_watched: bool, rate: float) -> None:
    assert Rates().rate(clean_steps, is_odd, is_watched) == rate


def test_all_auditors_together_compute_the_rate_again() -> None:
    assert chance(0.02, 8) * 8 == pytest.approx(0.02)
    assert chance(0.25, 0) == 0.25
    assert chance(3.0, 1) == 1.0


def test_the_less_exact_device_and_the_codec_set_the_tolerance() -> None:
    assert tolerance(FLOAT32, FLOAT32) == 1e-4
    assert tolerance(FLOAT32, BFLOAT16) == tolerance(BFLOAT16, FLOAT32) == 5e-2
    assert tolerance(FLOAT32, FLOAT32, quantum=0.024) == pytest.approx(1.5e-3, rel=0.1)
    assert tolerance(BFLOAT16, BFLOAT16, quantum=10.0) == MOST_TOLERANCE


@pytest.mark.parametrize("deviation", [math.nan, math.inf, -1.0, 1.0])
def test_a_result_that_is_far_off_or_no_number_is_wrong(deviation: float) -> None:
    assert AuditWord(deviation, 1e-4).differs
    assert AuditWord(deviation, 1e-4).accuses


def test_a_peer_accuses_only_what_every_exact_device_sees() -> None:
    assert not AuditWord(1e-4, 1e-4).differs
    assert AuditWord(2e-4, 1e-4).differs
    assert not AuditWord(2e-4, 1e-4).accuses


@pytest.mark.parametrize("told", [math.inf, math.nan, 1e300, -1.0])
def test_nobody_excuses_a_word_by_a_tolerance_of_its_own(told: float) -> None:
    assert AuditWord(0.9, told).differs
    assert not AuditWord(0.0, told).agrees_with(AuditWord(0.9, 1e-4))


def test_words_of_honest_peers_agree_though_one_sees_a_lie_that_the_other_does_not() -> None:
    exact, coarse = AuditWord(1e-3, 1e-4), AuditWord(2.1e-2, 5e-2)
    assert exact.accuses
    assert not coarse.differs
    assert exact.agrees_with(coarse)
    assert not exact.agrees_with(AuditWord(0.0, 1e-4))
    assert AuditWord(math.nan, 1e-4).agrees_with(AuditWord(math.inf, 1e-4))
    assert AuditWord(math.inf, 1e-4).agrees_with(AuditWord(1e300, 1e-4))


def test_of_a_large_lie_honest_peers_measure_as_large_an_error() -> None:
    """The bfloat16 of the auditor, or of the liar, makes a thousandfold result uncertain by ten."""
    assert AuditWord(990.0, 5e-2).agrees_with(AuditWord(1005.0, 5e-2))
    assert not AuditWord(990.0, 5e-2).agrees_with(AuditWord(0.0, MOST_TOLERANCE))
