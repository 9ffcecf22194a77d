"""Who calls: the name of a connection's socket holds the peer id that libp2p authenticated, and nothing else counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.link.tunnel import caller_of

PEER = "12D3KooWEXTUXiqjRrCJRZ1AJuwYtJ7E1hENCwDBAFpVVjKpVHJd"


@pytest.mark.parametrize("name", [f"unix:/tmp/run/from-{PEER}.0", f"unix:/a/from-b/from-{PEER}.99999"])
def test_the_caller_is_the_peer_in_the_sockets_name(name: str) -> None:
    assert caller_of(name) == PEER


@pytest.mark.parametrize("name", ["", "unix:", "unix:/tmp/run/to-x", "ipv4:127.0.0.1:4000", f"ipv4:from-{PEER}.0", f"/tmp/from-{PEER}.0"])
def test_a_call_that_did_not_come_through_the_tunnel_has_no_caller(name: str) -> None:
    assert caller_of(name) is None


@given(st.text(max_size=60))
def test_no_name_is_too_odd_to_be_asked_about(name: str) -> None:
    caller = caller_of(name)
    assert caller is None or name.startswith("unix:")
