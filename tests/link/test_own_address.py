"""A machine that loses the address from which it reached the others notices it, once, and not while it has no network at all."""

from __future__ import annotations

import pytest

from peerd.link import own_address
from peerd.link.own_address import OwnAddress, is_own, source_towards

HOSTS = ["203.0.113.1", "203.0.113.2"]


def test_the_system_tells_the_source_and_what_is_its_own() -> None:
    assert source_towards("127.0.0.1") == "127.0.0.1"
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.7")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The source towards each host; the addresses among them are the machine's own."""
    ways = dict.fromkeys(HOSTS, "192.168.1.5")
    monkeypatch.setattr(own_address, "source_towards", lambda host: ways.get(host, ""))
    monkeypatch.setattr(own_address, "is_own", lambda address: address in [*ways.values(), *ways])
    return ways


def test_another_address_in_place_of_the_old_one_is_told_once(machine: dict[str, str]) -> None:
    address = OwnAddress()
    assert not address.is_lost(HOSTS)
    machine.update(dict.fromkeys(HOSTS, ""))
    assert not address.is_lost(HOSTS), "there is no network to go on with"
    machine.update(dict.fromkeys(HOSTS, "10.0.0.9"))
    assert address.is_lost(HOSTS)
    assert not address.is_lost(HOSTS)


def test_the_same_address_after_a_gap_and_one_more_beside_it_are_no_loss(machine: dict[str, str]) -> None:
    address = OwnAddress()
    assert not address.is_lost(HOSTS)
    machine.update(dict.fromkeys(HOSTS, ""))
    assert not address.is_lost(HOSTS)
    machine.update(dict.fromkeys(HOSTS, "192.168.1.5"))
    assert not address.is_lost(HOSTS)
    machine[HOSTS[0]] = "10.0.0.9"
    assert not address.is_lost(HOSTS)
    machine[HOSTS[1]] = "10.0.0.9"
    assert address.is_lost(HOSTS)
