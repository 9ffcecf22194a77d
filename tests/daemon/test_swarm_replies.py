"""The table in plain values: what `peers` answers, and what answering costs a daemon in a large swarm."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import get_type_hints

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.control.protocol import PeerInfo
from peerd.daemon.swarm_replies import TableReport
from peerd.swarm.clock import clock_s
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_manifest
from peerd.table.record import Coordinate, PeerId, PeerRecord, Phase, StageSummary, Suspicion
from tests.tiny_run import tiny_manifest

KEY = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
NUM_STAGES = 5


def report_of(*records: PeerRecord) -> TableReport:
    """A table that has just heard these records."""
    signed = sign_manifest(tiny_manifest(num_stages=NUM_STAGES), KEY)
    membership = Membership(Identity(KEY), signed.run, ttl_s=3600)
    for record in records:
        membership.view.merge(record, clock_s())
    return TableReport(signed, membership)


def record(name: str, stage: int, **fields: object) -> PeerRecord:
    return replace(PeerRecord(peer=PeerId(name), incarnation=1, version=1, phase=Phase.ACCUMULATING, stage=stage), **fields)  # type: ignore[arg-type]


def test_a_row_has_a_value_of_the_declared_type_for_each_of_its_names() -> None:
    row = report_of().peer(record("a", 0, last_loss=1.5, throughput=2.5, coordinate=Coordinate(100, -200, 30, 50)))
    for name, kind in get_type_hints(PeerInfo).items():
        if name == "coordinate":
            assert row["coordinate"] == pytest.approx([0.01, -0.02, 0.003, 0.05])
        elif name not in ("path", "connections", "resent", "round_trip_s"):
            assert isinstance(row[name], list if name == "addresses" else kind), name  # type: ignore[literal-required]


def test_a_suspect_is_shown_in_its_stage_and_its_work_counts_as_missing() -> None:
    accused = Suspicion(PeerId("b"), 1, 1)
    reply = report_of(record("b", 0, done=0b110), record("a", 0, done=0b001, suspects=(accused,))).peers(1.0)
    shown = {peer["id"]: peer["suspect"] for peer in reply["stages"][0]["peers"]}
    assert shown == {"a": False, "b": True}
    everybody = report_of(*(record(f"p{stage}", stage) for stage in range(1, NUM_STAGES)), record("a", 0, done=0b001)).peers(1.0)
    assert everybody["stages"][0]["missing"] == 2


def test_a_peer_that_works_for_nothing_is_shown_as_such() -> None:
    peers = [record("a", 0, unaveraged=4), record("b", 0, unaveraged=5)]
    stage = report_of(*peers, *(record(f"p{stage}", stage) for stage in range(1, NUM_STAGES))).peers(1.0)["stages"][0]
    assert [(peer["phase"], peer["unaveraged"]) for peer in stage["peers"]] == [("accumulating", 4), ("unaveraged", 5)]


def test_hole_36_a_sidelined_peer_is_shown_as_such_and_its_work_counts_as_missing() -> None:
    others = [record(f"p{stage}", stage) for stage in range(1, NUM_STAGES)]
    mates = [record(name, 0, done=done, sidelined=(PeerId("c"),)) for name, done in (("a", 0b001), ("b", 0b010))]
    stage = report_of(*others, *mates, record("c", 0, done=0b100)).peers(1.0)["stages"][0]
    assert [peer["phase"] for peer in stage["peers"]] == ["accumulating", "accumulating", "sidelined"]
    assert stage["missing"] == 1


def test_of_a_stage_of_a_large_swarm_all_are_counted_though_few_are_known() -> None:
    told = StageSummary(peers=125, trainers=3, queue=40, throughput=900.0, held=0)
    report = report_of(record("me", 0), record("mate", 0, queue=2), *(record(f"far{n}", 3, queue=1, summary=told) for n in range(3)))
    report._membership.view.me = PeerId("me")
    near, far = (report.peers(1.0)["stages"][stage] for stage in (0, 3))
    assert (near["num_peers"], near["queue"], len(near["peers"])) == (2, 2, 2)
    assert (far["num_peers"], far["queue"], len(far["peers"])) == (125, 40, 3)
    live = report._membership.live()
    assert [live.queue(stage) for stage in (0, 1, 3)] == [2, 0, 40]


def test_a_thousand_peers_do_not_hold_up_the_daemon() -> None:
    """In processor time; asking for the suspects anew for every peer takes a quarter of a second."""
    report = report_of(*(record(f"p{number:04}", number % NUM_STAGES) for number in range(1000)))
    best_s = float("inf")
    for _ in range(3):
        began_s = time.process_time()
        reply = report.peers(1.0)
        best_s = min(best_s, time.process_time() - began_s)
    assert sum(len(stage["peers"]) for stage in reply["stages"]) == 1000
    assert best_s < 0.1
