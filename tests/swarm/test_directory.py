"""The directory's checks of what it keeps for others."""

from __future__ import annotations

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.link.libp2p import DHTID, DHTRecord, MSGPackSerializer, get_dht_time
from peerd.swarm import directory
from peerd.swarm.directory import MAX_SOUND, ROUND_TRIP_LIFE_S, RunValidator, stage_key, trial_key
from peerd.swarm.identity import Identity
from peerd.swarm.kept_values import MAX_VALUES, KeptValues
from peerd.swarm.signed import pack, sign_record
from peerd.table.record import PeerRecord, RunId
from peerd.table.view import TTL_PERIODS

RUN = RunId("a" * 32)
ME, OTHER = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(2))


PERIOD_S = 5.0


def stored(
    version: int = 1, stage: int = 1, signer: Identity = ME, key: str = stage_key(RUN, 1), life_s: float = 0.0, periods: int = 1
) -> DHTRecord:
    signed = sign_record(PeerRecord(peer=ME.peer, version=version, stage=stage, periods=periods), signer, RUN)
    key_bytes = DHTID.generate(source=key).to_bytes()
    return DHTRecord(key_bytes, msgpack.packb(ME.peer), MSGPackSerializer.dumps(pack(signed)), get_dht_time() + life_s)


def trial(value: object = "b" * 32, subkey: str = "a" * 32, key: str = trial_key(RUN), life_s: float = ROUND_TRIP_LIFE_S) -> DHTRecord:
    key_bytes = DHTID.generate(source=key).to_bytes()
    return DHTRecord(key_bytes, msgpack.packb(subkey), MSGPackSerializer.dumps(value), get_dht_time() + life_s)


def test_a_record_is_kept_under_its_own_stage_and_signature_only() -> None:
    validator = RunValidator(RUN, 2, PERIOD_S)
    for _ in range(2):
        assert validator.validate(stored())
        assert not validator.validate(stored(stage=0))
        assert not validator.validate(stored(signer=OTHER))


def test_what_was_found_sound_is_not_checked_again_and_what_is_remembered_of_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    validator, checked = RunValidator(RUN, 2, PERIOD_S), 0

    def unpack(_value: bytes, _run: RunId) -> object:
        nonlocal checked
        checked += 1
        return sign_record(PeerRecord(peer=ME.peer, stage=1), ME, RUN)

    monkeypatch.setattr(directory, "unpack_record", unpack)
    for _ in range(3):
        assert validator.validate(stored())
    assert checked == 1
    key, subkey = stored().key, stored().subkey
    for number in range(2 * MAX_SOUND):
        assert validator.validate(DHTRecord(key, subkey, MSGPackSerializer.dumps(number), 0.0))
    assert len(validator._sound) <= MAX_SOUND


def test_nothing_of_another_run_and_nothing_else_is_kept() -> None:
    validator = RunValidator(RUN, 2, PERIOD_S)
    assert not validator.validate(stored(key=stage_key(RunId("b" * 32), 1)))
    assert not validator.validate(stored(key=stage_key(RUN, 2)))
    assert not validator.validate(trial(key="anything"))
    assert not validator.validate(DHTRecord(stored().key, b"", stored().value, get_dht_time())), "a value without a subkey"
    assert not validator._sound


def test_a_newcomer_may_try_with_a_small_value_for_a_short_time() -> None:
    validator = RunValidator(RUN, 2, PERIOD_S)
    assert validator.validate(trial())
    assert not validator.validate(trial(value="b" * 200))
    assert not validator.validate(trial(life_s=ROUND_TRIP_LIFE_S + 60))


def test_a_record_is_kept_no_longer_than_it_counts() -> None:
    """Else one that ends later than all others would be the last to make room."""
    validator = RunValidator(RUN, 2, PERIOD_S)
    assert validator.validate(stored(life_s=TTL_PERIODS * PERIOD_S))
    assert not validator.validate(stored(life_s=3600.0))
    assert validator.validate(stored(life_s=3600.0, periods=256))
    assert not validator.validate(stored(life_s=1e9, periods=256))


def test_the_values_under_a_key_are_bounded_and_one_that_comes_again_is_kept() -> None:
    storage, key, expires = KeptValues(), DHTID.generate(source="key"), get_dht_time() + 60.0
    storage.store_subkey(key, "honest", b"1", expires)
    for number in range(3 * MAX_VALUES):
        assert storage.store_subkey(key, f"ghost{number}", b"x", expires + 60.0)
        if number % (MAX_VALUES // 2) == 0:
            assert storage.store_subkey(key, "honest", b"2", expires + 0.001 * (1 + number))
    kept = storage.get(key).value
    assert len(kept) == MAX_VALUES
    assert "honest" in kept


def test_what_is_stored_again_and_again_takes_no_memory() -> None:
    storage, key, expires = KeptValues(), DHTID.generate(source="key"), get_dht_time() + 60.0
    for number in range(20 * MAX_VALUES):
        storage.store_subkey(key, "one", b"x", expires + number * 0.001)
    assert len(storage.expiration_heap) <= 5 * MAX_VALUES
    assert len(storage.get(key).value.expiration_heap) <= 5 * MAX_VALUES
