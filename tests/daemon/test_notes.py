"""What a peer notes of the run's progress."""

from __future__ import annotations

from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.manifest import TrainConfig
from peerd.daemon.notes import Notes
from peerd.policy.swarm.health import NEVER_S
from peerd.swarm.identity import Identity, LocalState
from peerd.swarm.membership import Membership
from peerd.table.record import RunId


def test_after_a_pause_nothing_is_missed_since_before_it() -> None:
    """Nobody was missed while this peer rested: it did not look."""
    membership = Membership(Identity(Ed25519PrivateKey.from_private_bytes(bytes(32))), RunId("a" * 32), ttl_s=60.0)
    notes = Notes(membership, cast(LocalState, None), TrainConfig())
    assert set(notes.progress.lacks_since_s.values()) == {NEVER_S}, "as the daemon starts, it has read a table in which nobody was"
    began_s = notes.progress.since_s
    notes.begin_anew()
    assert (dict(notes.progress.lacks_since_s), notes.progress.since_s >= began_s) == ({}, True)
