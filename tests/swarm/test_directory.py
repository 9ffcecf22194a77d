"""The directory's checks of what it keeps for others."""

from __future__ import annotations

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.link.libp2p import DHTID, DHTRecord, MSGPackSerializer
from peerd.swarm import directory
from peerd.swarm.directory import MAX_SOUND, RunValidator, stage_key
from peerd.swarm.identity import Identity
from peerd.swarm.signed import pack, sign_record
from peerd.table.record import PeerRecord, RunId

RUN = RunId("a" * 32)
ME, OTHER = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(2))


def stored(version: int = 1, stage: int = 1, signer: Identity = ME, key: str = stage_key(RUN, 1)) -> DHTRecord:
    signed = sign_record(PeerRecord(peer=ME.peer, version=version, stage=stage), signer, RUN)
    key_bytes = DHTID.generate(source=key).to_bytes()
    return DHTRecord(key_bytes, msgpack.packb(ME.peer), MSGPackSerializer.dumps(pack(signed)), 0.0)


def test_a_record_is_kept_under_its_own_stage_and_signature_only() -> None:
    validator = RunValidator(RUN, 2)
    for _ in range(2):
        assert validator.validate(stored())
        assert not validator.validate(stored(stage=0))
        assert not validator.validate(stored(signer=OTHER))


def test_what_was_found_sound_is_not_checked_again_and_what_is_remembered_of_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    validator, checked = RunValidator(RUN, 2), 0

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


def test_what_another_run_keeps_is_not_judged_and_not_remembered() -> None:
    validator = RunValidator(RUN, 2)
    assert validator.validate(stored(signer=OTHER, key=stage_key(RunId("b" * 32), 1)))
    assert not validator._sound
