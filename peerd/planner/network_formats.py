"""The files that describe a network, as text: DT-FM's JSON, a CSV of pairs, and a CSV of devices. ValueError says what is wrong with one.

JSON: `delay_ms` and `bandwidth_gbps`, n rows of n numbers, and perhaps `names` or `regions`, `d_pp` and `d_dp` (stages and replicas of
the study), `c_pp_gbyte`, `c_dp_gbyte`.
CSV of pairs: from, to, delay_ms, mbit. A pair that is given in one direction only counts for both.
CSV of devices: name, and any of up_mbit, down_mbit, tflops, memory_gb, reliable, latitude, longitude.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from peerd.planner.dtfm import StudySizes
from peerd.planner.network import TYPICAL_FLOPS, PeerSpec, Topology
from peerd.policy.swarm.coordinates import coordinate_of, predicted_s

BYTES_PER_MBIT, BYTES_PER_GBIT = 125e3, 125e6
ACCESS_DELAY_S = 0.005
"""Of both access lines of a pair together."""
UNKNOWN_DELAY_S = 0.03
"""Between devices whose places are not given."""
SECONDS_A_KM = 7.5e-6
"""Light in fibre, on a route 1.5 times as long as the great circle."""
EARTH_KM = 6371.0
MOST_DEVICES = 4096


def read_network(text: str) -> tuple[Topology, StudySizes]:
    """The network in any of the formats, with the sizes of DT-FM's study; what the file does not say is as in the study."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(document, dict):
            raise ValueError("the JSON must be an object with delay_ms and bandwidth_gbps")
        return _from_matrices(document)
    rows = list(csv.DictReader(text.splitlines(), skipinitialspace=True, restkey="more"))
    columns = set(rows[0]) if rows else set()
    if {"from", "to", "delay_ms", "mbit"} <= columns:
        return _from_pairs(rows), StudySizes()
    if "name" in columns:
        return _from_devices(rows), StudySizes()
    raise ValueError("neither JSON with delay_ms and bandwidth_gbps, nor CSV with from,to,delay_ms,mbit or with name")


def swarm_network(reply: Mapping[str, Any], microbatch_size: int) -> Topology:
    """The peers of a running swarm, as `peerd peers --json` lists them: lines that nobody measured count as unlimited.

    Delays follow from the coordinates, within the round trips that the asked daemon has measured. Reliable are those that say that they
    stay; all, where nobody says so.
    """
    found = [peer for stage in reply["stages"] for peer in stage["peers"] if not peer["leaving"]]
    is_said = any(peer.get("stays_hours") for peer in found)
    peers = tuple(
        PeerSpec(
            name=peer["id"],
            memory_bytes=peer["memory_bytes"] or math.inf,
            up=peer["up"] or math.inf,
            down=peer["down"] or math.inf,
            stage=peer["stage"],
            microbatches_per_s=(peer.get("computes") or peer["throughput"]) / microbatch_size or None,
            is_reliable=peer.get("stays_hours", 0) > 0 or not is_said,
        )
        for peer in found
    )
    delays = tuple(tuple(0.0 if a is b else _foretold_delay_s(a, b) for b in found) for a in found)
    return Topology(peers, delays, ((math.inf,) * len(peers),) * len(peers))


def _foretold_delay_s(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """One way between two peers of a swarm."""
    if not one.get("coordinate") or not other.get("coordinate"):
        return UNKNOWN_DELAY_S
    here, there = (coordinate_of(peer["coordinate"]) for peer in (one, other))
    return predicted_s(here, there, one.get("round_trip_s", 0.0), other.get("round_trip_s", 0.0)) / 2


def _from_matrices(document: Mapping[str, Any]) -> tuple[Topology, StudySizes]:
    delays, rates = (_matrix(document, key) for key in ("delay_ms", "bandwidth_gbps"))
    names, regions = document.get("names"), document.get("regions")
    if names is None:
        places = regions if isinstance(regions, list) and len(regions) == len(delays) else ["device"] * len(delays)
        names = [f"{place}/{number}" for number, place in enumerate(places)]
    if not isinstance(names, list) or len(names) != len(delays):
        raise ValueError(f"names must be a list of {len(delays)} names")
    topology = Topology(
        tuple(PeerSpec(name=str(name)) for name in names),
        tuple(tuple(value / 1e3 for value in row) for row in delays),
        tuple(tuple(value * BYTES_PER_GBIT for value in row) for row in rates),
    )
    study = StudySizes()
    return topology, StudySizes(
        num_stages=_count(document, "d_pp", study.num_stages),
        num_replicas=_count(document, "d_dp", study.num_replicas),
        gradient_bytes=1e9 * _positive(document.get("c_dp_gbyte", study.gradient_bytes / 1e9), "c_dp_gbyte"),
        activation_bytes=1e9 * _positive(document.get("c_pp_gbyte", study.activation_bytes / 1e9), "c_pp_gbyte"),
    )


def _matrix(document: Mapping[str, Any], key: str) -> list[list[float]]:
    rows = document.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{key} must be rows of numbers")
    _check_number(rows)
    return [[_number(value, key) for value in row] for row in rows]


def _from_pairs(rows: Sequence[Mapping[str, str]]) -> Topology:
    names = sorted({row[end] or "" for row in rows for end in ("from", "to")})
    if "" in names:
        raise ValueError("a line names no device in from or to")
    _check_number(names)
    given: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        pair = (row["from"], row["to"])
        if pair in given:
            raise ValueError(f"{pair[0]} to {pair[1]} is given twice")
        given[pair] = (_number(row["delay_ms"], "delay_ms") / 1e3, _positive(row["mbit"], "mbit") * BYTES_PER_MBIT)
    links = {(a, b): given.get((a, b)) or given.get((b, a)) or ((0.0, math.inf) if a == b else None) for a in names for b in names}
    missing = [pair for pair, link in links.items() if link is None]
    if missing:
        raise ValueError(f"the link from {missing[0][0]} to {missing[0][1]} is missing ({len(missing)} in all)")
    return Topology(
        tuple(PeerSpec(name=name) for name in names),
        tuple(tuple((links[a, b] or (0.0, 0.0))[0] for b in names) for a in names),
        tuple(tuple((links[a, b] or (0.0, 0.0))[1] for b in names) for a in names),
    )


def _from_devices(rows: Sequence[Mapping[str, str]]) -> Topology:
    _check_number(rows)
    peers, places = [], []
    for number, row in enumerate(rows, 2):
        try:
            peers.append(_peer(row))
            places.append(_place(row))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return Topology(
        tuple(peers),
        tuple(tuple(0.0 if a == b else _delay_s(places[a], places[b]) for b in range(len(peers))) for a in range(len(peers))),
        ((math.inf,) * len(peers),) * len(peers),
    )


_DEVICE_COLUMNS = {"name", "up_mbit", "down_mbit", "tflops", "memory_gb", "reliable", "latitude", "longitude"}


def _peer(row: Mapping[str, str]) -> PeerSpec:
    unknown = sorted(set(row) - _DEVICE_COLUMNS)
    if unknown:
        raise ValueError(f"unknown column {unknown[0]}; known are {', '.join(sorted(_DEVICE_COLUMNS))}")

    def told(column: str, unit: float, default: float) -> float:
        return _positive(row[column], column) * unit if row.get(column) else default

    reliable = (row.get("reliable") or "yes").lower()
    if reliable not in ("yes", "no"):
        raise ValueError(f"reliable must be yes or no, not {reliable}")
    if not row["name"]:
        raise ValueError("the device has no name")
    return PeerSpec(
        name=row["name"],
        flops=told("tflops", 1e12, TYPICAL_FLOPS),
        memory_bytes=told("memory_gb", 1e9, math.inf),
        up=told("up_mbit", BYTES_PER_MBIT, math.inf),
        down=told("down_mbit", BYTES_PER_MBIT, math.inf),
        is_reliable=reliable == "yes",
    )


def _place(row: Mapping[str, str]) -> tuple[float, float] | None:
    if not row.get("latitude") and not row.get("longitude"):
        return None
    latitude, longitude = (_number(row.get(column), column) for column in ("latitude", "longitude"))
    if not (abs(latitude) <= 90 and abs(longitude) <= 180):
        raise ValueError(f"{latitude:g}, {longitude:g} is no place on Earth")
    return math.radians(latitude), math.radians(longitude)


def _delay_s(one: tuple[float, float] | None, other: tuple[float, float] | None) -> float:
    """One way, by the great circle between two places (haversine formula)."""
    if one is None or other is None:
        return UNKNOWN_DELAY_S
    north, east = (math.sin((b - a) / 2) ** 2 for a, b in zip(one, other, strict=True))
    return ACCESS_DELAY_S + SECONDS_A_KM * 2 * EARTH_KM * math.asin(math.sqrt(north + math.cos(one[0]) * math.cos(other[0]) * east))


def _check_number(devices: Sequence[object]) -> None:
    if len(devices) > MOST_DEVICES:
        raise ValueError(f"{len(devices)} devices are too many; {MOST_DEVICES} are the most")


def _number(value: object, what: str) -> float:
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{what} must be a number, not {str(value)[:40]!r}")


def _positive(value: object, what: str) -> float:
    number = _number(value, what)
    if not 0 < number < math.inf:
        raise ValueError(f"{what} must be above 0, not {number:g}")
    return number


def _count(document: Mapping[str, Any], key: str, default: int) -> int:
    value = document.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a whole number from 1 on")
    return value
