"""What a daemon keeps of accounts on disk: it goes on from there, thins it, and writes receipts that everybody can check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.receipt_file import has_signed, key_of, pack_account, pack_receipt, peer_of, read_receipt, unpack_account
from peerd.errors import BadMessageError, SignatureError
from peerd.observe.account_store import DAY_S
from peerd.policy.step.accounts import EVERY, why_not_certified
from peerd.policy.step.work_receipts import MOST_BYTES, WorkReceipt, proven
from peerd.swarm.signed import sign_manifest
from peerd.table.record import RunId
from peerd.wire.accounts import AccountsTold, AccountsWanted, told_from, told_to
from tests.observe.account_daemons import PER_STEP, RUN, SIGNED, TOKENS, Daemon, anchor, days, train
from tests.policy.account_world import roster
from tests.tiny_run import tiny_manifest


@pytest.fixture
def daemons(tmp_path: Path) -> list[Daemon]:
    return [Daemon(tmp_path, name) for name in "abc"]


def test_a_receipt_of_all_work_and_one_of_the_last_day(daemons: list[Daemon]) -> None:
    days(daemons, 3)
    first = daemons[0]
    share = roster(0, [each.me.peer for each in daemons], per_step=PER_STEP).computed[first.me.peer].bit_count()
    read = read_receipt(first.receipt(), RUN)
    (told,) = proven(read.receipt)
    assert (told.work.microbatches, told.work.tokens, told.whole.microbatches) == (
        3 * EVERY * share,
        3 * EVERY * share * TOKENS,
        3 * EVERY * PER_STEP,
    )
    assert (told.num_signers, told.times_s[1], read.manifest) == (3, 3 * DAY_S, SIGNED.manifest)
    (told,) = proven(read_receipt(first.receipt(since_s=2 * DAY_S)).receipt)
    assert (told.steps, told.work.microbatches) == ((2 * EVERY, 3 * EVERY), EVERY * share)
    with first.store() as store:
        assert first.keeper.parts(store, 3 * DAY_S) == ()
        known = [stored.signed.account.id for stored in store.of_stage(0)]
    assert proven(read.receipt, known)[0].is_anchored


def test_a_changed_byte_anywhere_is_refused_with_its_reason(daemons: list[Daemon]) -> None:
    days(daemons, 1)
    raw = daemons[0].receipt()
    reasons = set()
    for at in range(0, len(raw), 7):
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(SignatureError, match="proves nothing") as refusal:
            read_receipt(changed)
        reasons.add(refusal.value.message.partition(": ")[2])
    assert any("changed after its peer had signed it" in reason for reason in reasons)
    for broken in (b"", raw[:-1], raw + b"\0", bytes(MOST_BYTES + 1)):
        with pytest.raises(SignatureError):
            read_receipt(broken)


def test_a_receipt_of_another_run_and_one_that_another_peer_has_signed_are_refused(daemons: list[Daemon]) -> None:
    days(daemons, 1)
    with pytest.raises(SignatureError, match="another run"):
        read_receipt(daemons[0].receipt(), RunId("b" * 32))
    with daemons[0].store() as store:
        receipt = WorkReceipt(RUN, daemons[0].me.peer, daemons[0].keeper.parts(store, 0))
    with pytest.raises(SignatureError, match="another has signed it"):
        read_receipt(pack_receipt(receipt, SIGNED.raw, daemons[1].me.sign))
    other = sign_manifest(tiny_manifest(num_stages=2), Ed25519PrivateKey.generate())
    with pytest.raises(SignatureError, match="is not its own"):
        read_receipt(pack_receipt(receipt, other.raw, daemons[0].me.sign))
    forged = (SIGNED.raw[0], SIGNED.raw[1], bytes(64))
    with pytest.raises(SignatureError, match="not signed by its organiser"):
        read_receipt(pack_receipt(receipt, forged, daemons[0].me.sign))


def test_counts_that_the_runs_steps_cannot_have_had_are_refused(tmp_path: Path) -> None:
    """Even signers that all lie cannot claim more microbatches than a step has."""
    liar = Daemon(tmp_path, "liar")
    with liar.store() as store:
        liar.keeper.applied(store, [(roster(step, [liar.me.peer], per_step=PER_STEP + 1), TOKENS) for step in range(EVERY)], 5)
    with pytest.raises(SignatureError, match="more than the steps had"):
        read_receipt(liar.receipt())


def test_a_daemon_that_starts_again_goes_on_from_its_last_account(daemons: list[Daemon]) -> None:
    train(daemons, range(2 * EVERY))
    daemons[0].keeper = daemons[0].new_keeper()
    train(daemons, range(2 * EVERY, 3 * EVERY))
    with daemons[1].store() as store:
        newest = store.with_rows(0)
    assert newest is not None
    assert newest[0].account.counted.steps == 3 * EVERY
    assert [each.signer for each in newest[0].vouches] == sorted(each.me.peer for each in daemons)


def test_who_comes_later_takes_the_rows_over(daemons: list[Daemon], tmp_path: Path) -> None:
    train(daemons, range(EVERY + 5))
    late = Daemon(tmp_path, "late")
    together = [*daemons, late]
    train(together, range(EVERY + 5, 2 * EVERY))
    needs = late.keeper.needs()
    assert needs is not None
    assert needs.rows_of is not None
    with daemons[0].store() as store:
        found = store.with_rows(0, needs.rows_of.account.step)
    assert found is not None
    with late.store() as store:
        assert not late.keeper.take(store, needs.rows_of, {})
        assert late.keeper.take(store, *found)
    train(together, range(2 * EVERY, 3 * EVERY))
    assert late.me.peer in [each.signer for each in late.told()[-1].vouches]
    (told,) = proven(read_receipt(late.receipt()).receipt)
    assert told.work.steps == 2 * EVERY - 5, "mates have counted the steps before it came into the accounts, too"


def test_the_chain_of_a_receipt_begins_at_the_newest_account_that_the_organiser_has_signed(daemons: list[Daemon], tmp_path: Path) -> None:
    """Whoever has nothing but the receipt knows by the manifest in it that its signers are peers of the run."""
    days(daemons, 2)
    anchor(daemons[0])
    train(daemons, range(2 * EVERY, 3 * EVERY), 3 * DAY_S)
    (told,) = proven(read_receipt(daemons[1].receipt(), RUN).receipt)
    assert (told.chain_from, told.is_by_organiser, told.work.steps) == (2 * EVERY, True, 3 * EVERY)
    for since_s, steps in ((DAY_S, (EVERY, 3 * EVERY)), (2 * DAY_S, (2 * EVERY, 3 * EVERY))):
        (told,) = proven(read_receipt(daemons[1].receipt(since_s), RUN).receipt)
        assert (told.steps, told.is_by_organiser) == (steps, True)
    crowd = [Daemon(tmp_path, name) for name in "xyz"]
    days(crowd, 3)
    assert not proven(read_receipt(crowd[0].receipt(), RUN).receipt)[0].is_anchored, "keys that sign for each other"


def test_the_newest_account_that_the_organiser_has_signed_is_kept_on_disk(daemons: list[Daemon]) -> None:
    train(daemons[:1], range(EVERY * 3), 0)
    anchor(daemons[0])
    for number in range(3, 24 * 11):
        train(daemons[:1], range(number * EVERY, (number + 1) * EVERY), number * 3600)
    (told,) = proven(read_receipt(daemons[0].receipt(), RUN).receipt)
    assert (told.chain_from, told.is_by_organiser) == (3 * EVERY, True)


def test_rows_are_kept_of_one_account_a_day_and_accounts_are_thinned(daemons: list[Daemon]) -> None:
    alone = daemons[:1]
    for hour in range(24 * 11):
        train(alone, range(hour * EVERY, (hour + 1) * EVERY), hour * 3600)
    with alone[0].store() as store:
        with_rows = [stored.signed for stored in store.of_stage(0) if store.with_rows(0, stored.signed.account.step)]
        assert [signed.time_s // DAY_S for signed in with_rows] == [3, 4, 5, 6, 7, 8, 9, 10, 10]
        assert len(store.of_stage(0)) < 200
        week = store.with_rows(0, before_s=10 * DAY_S - 7 * DAY_S + 1)
        assert week is not None
        assert week[0].time_s == 3 * DAY_S
        assert [signed.account.step for signed in store.newest()] == [24 * 11 * EVERY]


def test_of_a_count_that_is_younger_than_a_week_nothing_is_taken_away(daemons: list[Daemon]) -> None:
    days(daemons, 2)
    with daemons[0].store() as store:
        assert store.with_rows(0, before_s=DAY_S // 2) is None


def test_an_account_comes_back_from_its_bytes(daemons: list[Daemon]) -> None:
    train(daemons, range(EVERY))
    (signed,) = daemons[0].told()
    assert unpack_account(pack_account(signed), RUN, 0) == signed
    assert why_not_certified(signed, has_signed) == ""
    assert peer_of(key_of(daemons[0].me.peer)) == daemons[0].me.peer
    for broken in (b"", b"\x90", b"\xc1", bytes(40), pack_account(signed)[:-1]):
        with pytest.raises(ValueError, match="no account"):
            unpack_account(broken, RUN, 0)


@pytest.mark.parametrize("number", [(1 << 37) - 1, 1 << 37, (1 << 62) - 1, 1 << 62])
@pytest.mark.parametrize("what", ["time", "tokens"])
def test_a_file_gives_back_every_account_that_a_peer_may_tell(daemons: list[Daemon], what: str, number: int) -> None:
    """One that could be written and not read would take all others from the daemon, too."""
    train(daemons, range(EVERY))
    (signed,) = daemons[0].told()
    if what == "time":
        signed = replace(signed, vouches=(replace(signed.vouches[0], time_s=number), *signed.vouches[1:]))
    else:
        signed = replace(signed, account=replace(signed.account, counted=replace(signed.account.counted, tokens=number)))
    try:
        told = told_from(told_to(AccountsTold((signed,))), RUN, AccountsWanted(0), daemons[1].me.peer)
    except BadMessageError:
        return
    assert [unpack_account(pack_account(each), RUN, 0) for each in told.accounts] == [signed]
