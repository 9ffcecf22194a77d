"""The organiser's key: created once, readable by its owner only, never overwritten."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from peerd.config.organiser import create_key, load_key, public_bytes
from peerd.errors import DiskError, SignatureError, UsageError


def test_a_key_comes_back_from_its_file(tmp_path: Path) -> None:
    made = create_key(tmp_path / "k")
    assert public_bytes(load_key(tmp_path / "k")) == public_bytes(made)
    assert len(public_bytes(made)) == 32


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    create_key(tmp_path / "k")
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


def test_it_is_never_overwritten(tmp_path: Path) -> None:
    create_key(tmp_path / "k")
    before = (tmp_path / "k").read_bytes()
    with pytest.raises(UsageError, match="never overwritten"):
        create_key(tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == before


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "k").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        create_key(tmp_path / "k")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file"):
        create_key(tmp_path / "no" / "k")


@pytest.mark.parametrize("content", [b"", b"not a key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", b"\0" * 100])
def test_what_is_not_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(SignatureError, match="not an organiser's key"):
        load_key(tmp_path / "k")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = other.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "k").write_bytes(pem)
    with pytest.raises(SignatureError, match="Ed25519"):
        load_key(tmp_path / "k")


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match="peerd new"):
        load_key(tmp_path / "k")
