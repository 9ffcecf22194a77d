"""The paths of a daemon's sockets are always short enough for a socket address."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.paths import MAX_SOCKET_NAME_CHARS, MAX_SOCKET_PATH_CHARS, Home
from peerd.link.peer_keys import peer_id_of

LONGEST_NAME = "from-" + peer_id_of(Ed25519PrivateKey.generate().public_key().public_bytes_raw()) + ".99999"


def test_no_socket_of_a_daemon_has_a_longer_name_than_is_reckoned_with() -> None:
    assert len(LONGEST_NAME) == MAX_SOCKET_NAME_CHARS


@given(st.integers(1, 300))
def test_every_home_leaves_room_for_every_socket(length: int) -> None:
    run_folder = Home(Path("/" + "h" * length)).run_folder
    assert len(str(run_folder / LONGEST_NAME)) <= MAX_SOCKET_PATH_CHARS


@pytest.mark.parametrize("length", [1, 20, 40, 60, 120])
def test_a_socket_of_the_longest_name_can_be_made_whatever_the_home(length: int) -> None:
    with tempfile.TemporaryDirectory(prefix="peerd-t-") as short:
        home = Home(Path(short) / ("h" * length))
        run_folder = home.run_folder
        run_folder.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(run_folder / LONGEST_NAME))
        (run_folder / LONGEST_NAME).unlink()
        run_folder.rmdir()


def test_a_short_home_keeps_its_sockets_inside() -> None:
    assert Home(Path("/home/somebody/.local/state/peerd")).run_folder == Path("/home/somebody/.local/state/peerd/run")


def test_two_long_homes_never_share_a_folder() -> None:
    first, second = (Home(Path("/" + "h" * 100 + end)).run_folder for end in ("a", "b"))
    assert first != second
