"""Holes in routers: which addresses are sent to, when one has closed, and who is asked from where packets come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.holes import BUSY_BYTES, IDLE_SILENT_S, MOST_ADDRESSES, SILENT_S, Silence, targets_in


@pytest.mark.parametrize(
    ("told", "targets"),
    [
        ((), []),
        (("203.0.113.5:4000", "192.168.1.2:4000"), ["203.0.113.5:4000", "192.168.1.2:4000"]),
        (("203.0.113.5:4000", "203.0.113.5:4000"), ["203.0.113.5:4000"]),
        (("203.0.113.5", "203.0.113.5:0", "203.0.113.5:65536", "203.0.113.5:+9", "203.0.113.5:123456"), []),
        (("example.org:4000", "[::1]:4000", "1.2.3:4", ":", ""), []),
        (("224.0.0.1:4000", "255.255.255.255:4000", "0.0.0.0:4000", "169.254.169.254:80", "240.0.0.1:4"), []),
        (tuple(f"10.0.0.{number}:1" for number in range(1, 9)), [f"10.0.0.{number}:1" for number in range(1, 1 + MOST_ADDRESSES)]),
    ],
)
def test_packets_go_to_addresses_of_one_machine_each(told: tuple[str, ...], targets: list[str]) -> None:
    assert targets_in(told, loopback=False) == targets


def test_loopback_is_for_a_peer_that_listens_there() -> None:
    assert targets_in(["127.0.0.1:4000"], loopback=False) == []
    assert targets_in(["127.0.0.1:4000"], loopback=True) == ["127.0.0.1:4000"]


@pytest.mark.parametrize(
    ("outside", "targets"),
    [
        ("", ["203.0.113.9:4000", "192.168.1.2:4000"]),
        ("198.51.100.1", ["203.0.113.9:4000", "192.168.1.2:4000"]),
        ("8.8.8.8", ["9.9.9.9:4000"]),
        ("9.9.9.9", ["9.9.9.9:4000", "192.168.1.2:4000"]),
        ("10.0.0.7", ["9.9.9.9:4000", "192.168.1.2:4000"]),
    ],
)
def test_addresses_of_a_private_network_are_for_peers_in_it(outside: str, targets: list[str]) -> None:
    first = "203.0.113.9:4000" if "203.0.113.9:4000" in targets else "9.9.9.9:4000"
    assert targets_in([first, "192.168.1.2:4000"], loopback=False, outside=outside) == targets


def test_a_hole_has_closed_when_nothing_comes_back() -> None:
    silence = Silence()
    assert not silence.is_closed(10, 10, 0.0)
    assert not silence.is_closed(10, 10, 100.0), "nothing was sent"
    assert not silence.is_closed(20, 10, 101.0)
    assert not silence.is_closed(30, 10, 101.0 + 0.9 * SILENT_S)
    assert not silence.is_closed(40, 20, 101.0 + 0.95 * SILENT_S), "something came"
    assert not silence.is_closed(40, 20, 101.0 + 9 * SILENT_S), "that was the answer to all"
    assert not silence.is_closed(50, 20, 200.0)
    assert not silence.is_closed(40 + BUSY_BYTES - 1, 20, 200.0 + SILENT_S), "signs of life may be lost in full buffers"
    assert silence.is_closed(40 + BUSY_BYTES, 20, 200.0 + SILENT_S)
    assert silence.is_closed(50, 20, 200.0 + IDLE_SILENT_S)


@given(st.lists(st.tuples(st.floats(0.1, 0.9 * SILENT_S), st.integers(0, 3)), max_size=30))
def test_a_hole_through_which_each_packet_is_answered_in_time_never_counts_as_closed(looks: list[tuple[float, int]]) -> None:
    silence, now_s, sent, received = Silence(), 0.0, 0, 0
    for pause_s, more in looks:
        now_s += pause_s
        sent, received = sent + more, sent
        assert not silence.is_closed(sent, received, now_s)
