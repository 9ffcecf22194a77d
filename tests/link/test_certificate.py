"""A certificate proves the peer id of its owner and nobody else's, for as long as it is valid."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from peerd.errors import BadMessageError, WrongStateError
from peerd.link.certificate import MAX_CERTIFICATE_BYTES, Certificate, checked_pem, holder_of, make_certificate
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId
from tests.wire.callee import new_identity


def certificate_of(identity: Identity, claims: PeerId | None = None) -> Certificate:
    """Its own, or one in which it claims to be another."""
    return make_certificate(claims or identity.peer, identity.sign)


def test_a_peers_own_certificate_is_taken_as_it_is() -> None:
    owner = new_identity()
    made = certificate_of(owner)
    assert checked_pem(made.der, owner.peer) == made.pem
    assert holder_of(made.der) == owner.peer
    assert len(made.der) < MAX_CERTIFICATE_BYTES
    assert made.key_pem not in made.pem


def test_a_certificate_is_nobody_elses() -> None:
    owner, thief = new_identity(), new_identity()
    with pytest.raises(BadMessageError, match=f"not that of {thief.peer}"):
        checked_pem(certificate_of(owner).der, thief.peer)


def test_a_certificate_signed_with_another_key_than_the_peers_proves_nothing() -> None:
    victim, liar = new_identity(), new_identity()
    with pytest.raises(BadMessageError, match="proves no peer id"):
        checked_pem(certificate_of(liar, claims=victim.peer).der, victim.peer)


def test_a_certificate_counts_only_while_it_is_valid() -> None:
    owner, now = new_identity(), datetime.datetime.now(datetime.UTC)
    der = make_certificate(owner.peer, owner.sign, now=now, days=2).der
    for days in (-2, 3):
        with pytest.raises(WrongStateError, match="expired, or is not valid yet"):
            checked_pem(der, owner.peer, now=now + datetime.timedelta(days=days))
    checked_pem(der, owner.peer, now=now + datetime.timedelta(days=1))


def test_the_proof_of_one_certificate_is_of_no_use_in_another() -> None:
    owner = new_identity()
    proof = x509.load_der_x509_certificate(certificate_of(owner).der).extensions[1].value
    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    forged = builder.add_extension(proof, critical=False).sign(key, SHA256()).public_bytes(Encoding.DER)
    with pytest.raises(BadMessageError, match="proves no peer id"):
        checked_pem(forged, owner.peer)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@given(st.binary(max_size=300), st.integers(0, 500))
def test_no_bytes_are_too_odd_to_be_looked_at(junk: bytes, at: int) -> None:
    der = _SOUND.der[:at] + junk + _SOUND.der[at + len(junk) :]
    try:
        assert checked_pem(der, _OWNER.peer)
    except BadMessageError:
        return


_OWNER = new_identity()
_SOUND = certificate_of(_OWNER)
