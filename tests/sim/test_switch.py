"""The benchmarks' switch in user space: up and down have rates of their own, and ways have delay, loss and jitter, which may change."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._switch import BUFFER_S, VNET_HEADER, Links, Port, Rates, Switch, Way, wire_s

HOSTS = ("10.99.0.1", "10.99.0.2", "10.99.0.3")
ONE, TWO, THREE = HOSTS
KILOBYTE = 1000
BEGAN_S = 100.0
"""All links have been idle until then."""


def switch_of(links: Links, seed: int = 0) -> Switch:
    ports = {socket.inet_aton(host): Port(device) for device, host in enumerate(HOSTS)}
    return Switch(links, ports, random.Random(seed))


def packet(origin: str, target: str, number: int = 0, size: int = KILOBYTE) -> bytes:
    """A packet of `size` bytes that bears a number."""
    ip = bytearray(20)
    ip[12:16], ip[16:20] = socket.inet_aton(origin), socket.inet_aton(target)
    return VNET_HEADER.pack(0, 0, 0, 0, 0, 0) + bytes(ip) + number.to_bytes(4, "big") + bytes(size - 24)


def number_of(found: bytes) -> int:
    return int.from_bytes(found[VNET_HEADER.size + 20 :][:4], "big")


def send(switch: Switch, origin: str, target: str, number: int = 0, now_s: float = 0.0) -> None:
    switch.send(switch.ports[socket.inet_aton(origin)], packet(origin, target, number), BEGAN_S + now_s)


def arrivals(switch: Switch) -> list[tuple[float, int, int]]:
    """Carry all packets: the time at which each has arrived, its device and its number."""
    found = []
    while switch.on_their_way:
        now_s = switch.on_their_way[0][0]
        found += [(now_s - BEGAN_S, device, number_of(data)) for device, data in switch.due(now_s)]
    return found


def times_s(switch: Switch) -> list[float]:
    return [at_s for at_s, _, _ in arrivals(switch)]


def test_a_connection_sends_at_one_rate_and_receives_at_another() -> None:
    links = Links(mbit_per_s=8, round_trip_ms=0, rates={ONE: Rates(up=1, down=4)})
    there, back = switch_of(links), switch_of(links)
    for number in range(10):
        send(there, ONE, TWO, number)
        send(back, TWO, ONE, number)
    assert times_s(there) == pytest.approx([wire_s(KILOBYTE, 1) * (number + 1) for number in range(10)])
    assert times_s(back)[-1] == pytest.approx(wire_s(KILOBYTE, 8) + 9 * wire_s(KILOBYTE, 4))


def test_a_full_modem_loses_packets_and_takes_some_again_once_it_has_sent_some() -> None:
    switch = switch_of(Links(mbit_per_s=1, round_trip_ms=0))
    fits = int(BUFFER_S / wire_s(KILOBYTE, 1)) + 1
    for number in range(2 * fits):
        send(switch, ONE, TWO, number)
    assert len(switch.on_their_way) == fits
    send(switch, ONE, TWO, now_s=2 * wire_s(KILOBYTE, 1))
    assert len(switch.on_their_way) == fits + 1
    fast = switch_of(Links(mbit_per_s=0, round_trip_ms=0))
    for number in range(2 * fits):
        send(fast, ONE, TWO, number)
    assert len(fast.on_their_way) == 2 * fits


def test_a_full_downlink_loses_packets_so_that_none_waits_for_much_longer_than_a_second() -> None:
    switch = switch_of(Links(mbit_per_s=0, round_trip_ms=0, rates={TWO: Rates(up=1, down=1)}))
    fits = int(BUFFER_S / wire_s(KILOBYTE, 1)) + 1
    for number in range(2 * fits):
        send(switch, ONE, TWO, number)
    came = times_s(switch)
    assert len(came) == pytest.approx(fits, abs=1)
    assert came[-1] == pytest.approx(BUFFER_S + wire_s(KILOBYTE, 1), abs=wire_s(KILOBYTE, 1))


def test_two_senders_share_the_downlink_of_a_third() -> None:
    switch = switch_of(Links(mbit_per_s=1, round_trip_ms=20))
    for number in range(10):
        send(switch, ONE, THREE, number)
        send(switch, TWO, THREE, number)
    assert times_s(switch)[-1] == pytest.approx(0.01 + wire_s(KILOBYTE, 1) * 20)


def test_each_way_has_its_own_delay_and_a_slow_one_holds_no_other_up() -> None:
    slow = Way(origin=ONE, target=THREE, delay_ms=300)
    switch = switch_of(Links(mbit_per_s=0, round_trip_ms=20, ways=[slow]))
    send(switch, ONE, THREE, 1)
    send(switch, TWO, THREE, 2)
    send(switch, THREE, ONE, 3)
    found = arrivals(switch)
    assert [(device, number) for _, device, number in found] == [(2, 2), (0, 3), (2, 1)]
    assert [at_s for at_s, _, _ in found] == pytest.approx([0.01, 0.01, 0.3])


def test_a_way_loses_its_share_of_packets_and_a_dead_one_all() -> None:
    ways = [Way(origin=ONE, target=TWO, delay_ms=0, loss=0.03), Way(origin=TWO, target=ONE, delay_ms=0, loss=1)]
    switch, sent = switch_of(Links(mbit_per_s=0, round_trip_ms=0, ways=ways)), 20_000
    for _ in range(sent):
        send(switch, ONE, TWO)
        send(switch, TWO, ONE)
        send(switch, TWO, THREE)
    devices = [device for _, device, _ in arrivals(switch)]
    assert devices.count(0) == 0
    assert 0.96 * sent < devices.count(1) < 0.98 * sent
    assert devices.count(2) == sent


@given(st.integers(0, 2**32), st.lists(st.floats(0, 0.1), min_size=1, max_size=60))
def test_jitter_makes_packets_late_within_its_bound_and_none_overtakes_another(seed: int, gaps_s: list[float]) -> None:
    way = Way(origin=ONE, target=TWO, delay_ms=30, jitter_ms=100)
    switch, now_s, sent_s = switch_of(Links(mbit_per_s=0, round_trip_ms=0, ways=[way]), seed), 0.0, []
    for number, gap_s in enumerate(gaps_s):
        now_s += gap_s
        sent_s.append(now_s)
        send(switch, ONE, TWO, number, now_s)
    found = arrivals(switch)
    assert [number for _, _, number in found] == list(range(len(gaps_s)))
    for (at_s, _, _), since_s in zip(found, sent_s, strict=True):
        assert since_s + 0.03 - 1e-9 <= at_s <= since_s + 0.13 + 1e-9


def test_a_connection_that_becomes_slow_is_slow_from_then_on() -> None:
    switch = switch_of(Links(mbit_per_s=100, round_trip_ms=0))
    send(switch, ONE, TWO)
    switch.obey({"links": asdict(Links(mbit_per_s=100, round_trip_ms=0, rates={ONE: Rates(up=5, down=5)}))})
    send(switch, ONE, TWO)
    first_s, second_s = times_s(switch)
    assert first_s == pytest.approx(wire_s(KILOBYTE, 100))
    assert second_s == pytest.approx(first_s + wire_s(KILOBYTE, 5))


def test_a_way_that_breaks_loses_what_is_sent_meanwhile_and_nothing_else() -> None:
    sound = Links(mbit_per_s=0, round_trip_ms=10)
    switch = switch_of(sound)
    send(switch, ONE, TWO, 1)
    switch.change(Links(mbit_per_s=0, round_trip_ms=10, ways=[Way(origin=ONE, target=TWO, delay_ms=5, loss=1)]))
    send(switch, ONE, TWO, 2)
    switch.change(sound)
    send(switch, ONE, TWO, 3)
    assert [number for _, _, number in arrivals(switch)] == [1, 3]


def test_a_machine_keeps_its_rates_under_another_address() -> None:
    links = Links(mbit_per_s=0, round_trip_ms=0, rates={ONE: Rates(up=1, down=1)})
    switch = switch_of(links)
    switch.obey({"address": "10.99.0.128", "of": ONE})
    switch.obey({"links": asdict(links)})
    send(switch, ONE, TWO)
    assert times_s(switch) == pytest.approx([wire_s(KILOBYTE, 1)])


def test_links_travel_as_json() -> None:
    links = Links(
        mbit_per_s=20,
        round_trip_ms=60,
        rates={ONE: Rates(up=5, down=100)},
        ways=[Way(origin=ONE, target=TWO, delay_ms=30, loss=0.03, jitter_ms=100)],
    )
    assert Links.read(json.loads(json.dumps(asdict(links)))) == links


@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.sampled_from(HOSTS), st.floats(0, 0.01)), max_size=80), st.floats(0.5, 50))
def test_packets_of_a_pair_arrive_in_order_and_never_faster_than_either_rate(packets: list[tuple[str, str, float]], down: float) -> None:
    switch, now_s = switch_of(Links(mbit_per_s=10, round_trip_ms=10, rates={TWO: Rates(up=2, down=down)})), 0.0
    for number, (origin, target, gap_s) in enumerate(packets):
        now_s += gap_s
        send(switch, origin, target, number, now_s)
    found = arrivals(switch)
    assert len(found) == len(packets)
    for origin in HOSTS:
        for target in HOSTS:
            numbers = [number for _, _, number in found if packets[number][:2] == (origin, target)]
            assert numbers == sorted(numbers)
    at_two = [at_s for at_s, device, _ in found if device == 1]
    for earlier_s, later_s in itertools.pairwise(at_two):
        assert later_s - earlier_s >= wire_s(KILOBYTE, down) - 1e-9


RECEIVER = """
import socket, time
with socket.create_server(("0.0.0.0", 7000)) as door:
    print("ready", flush=True)
    with door.accept()[0] as line:
        line.recv(1, socket.MSG_PEEK)
        began_s, size = time.monotonic(), 0
        while got := len(line.recv(1 << 16)):
            size += got
        print(size, time.monotonic() - began_s, flush=True)
"""
SENDER = "import socket, sys\nwith socket.create_connection((sys.argv[1], 7000)) as line:\n  line.sendall(bytes(int(sys.argv[2])))"


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="makes network namespaces, which needs root")
def test_kernels_send_through_it_at_the_rates_of_their_own_connections() -> None:
    """The first machine sends 1 MB at 8 Mbit/s and receives it at 16."""
    num_bytes = 1_000_000
    with Network(2, Links(mbit_per_s=100, round_trip_ms=20)) as network:
        network.change(replace(network.links, rates={network.address(0): Rates(up=8, down=16)}))
        for sender, rate in ((0, 8.0), (1, 16.0)):
            taking = [*network.command(1 - sender), sys.executable, "-c", RECEIVER]
            with subprocess.Popen(taking, stdout=subprocess.PIPE, text=True) as receiver:
                assert receiver.stdout is not None
                assert receiver.stdout.readline() == "ready\n"
                giving = [*network.command(sender), sys.executable, "-c", SENDER, network.address(1 - sender), str(num_bytes)]
                subprocess.run(giving, check=True, timeout=60)
                size, took_s = receiver.stdout.readline().split()
            assert int(size) == num_bytes
            assert wire_s(num_bytes, rate) <= float(took_s) * 1.02 <= 1.5 * wire_s(num_bytes, rate) + 1.0
