"""Replies of a daemon as values, for tests of their readers."""

from __future__ import annotations

from typing import Any, cast

from peerd.config import limits
from peerd.control.audits import AuditReply, AuditsInfo
from peerd.control.protocol import (
    ContributionsReply,
    Counters,
    EventInfo,
    HistoryReply,
    OwnerInfo,
    PeerInfo,
    PeersReply,
    RunInfo,
    StatusReply,
)
from peerd.control.texts import TextReply, TextsInfo
from peerd.policy.owner.governor import Limits


def run_info(**changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "id": "9f2c" * 8,
        "name": "demo",
        "num_stages": 2,
        "microbatches_per_step": 16,
        "steps": 30,
        "tokens_per_step": 8192,
        "boundary_bytes": 262144,
    }
    return cast("RunInfo", {**fields, **changes})


def peer_info(**changes: Any) -> PeerInfo:
    fields: dict[str, Any] = {
        "id": "12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F",
        "stage": 0,
        "step": 3,
        "phase": "accumulating",
        "leaving": False,
        "suspect": False,
        "queue": 2,
        "in_flight": 1,
        "done": 7,
        "next_done": 0,
        "throughput": 123.4,
        "tokens": 40960,
        "last_loss": 3.21,
        "device": "cpu",
        "memory_bytes": 8 << 30,
        "software": "peerd 0.1.0",
        "incarnation": 1,
        "inexact": 0,
        "trains": True,
        "addresses": ["/ip4/127.0.0.1/tcp/31337"],
        "reach": "direct",
        "relays": False,
        "unaveraged": 0,
        "up": 0,
        "down": 0,
        "coordinate": None,
        "computes": 0.0,
        "backlog": 0.0,
        "age_s": 0.4,
    }
    return cast("PeerInfo", {**fields, **changes})


def counters(**changes: int) -> Counters:
    return cast("Counters", {**dict.fromkeys(Counters.__annotations__, 0), **changes})


def owner_info(**changes: Any) -> OwnerInfo:
    return cast("OwnerInfo", {**limits.owner_info(Limits()), **changes})


def texts_info(**changes: Any) -> TextsInfo:
    fields: dict[str, Any] = {
        "share": 0.02,
        "steps": [3],
        "texts": 1,
        "waiting": 0,
        "bytes": 40_000,
        "most_bytes": 2_000_000,
        "tokens": 1200,
        "busy_s": 7.0,
        "answering": False,
        "asking": 0,
    }
    return cast("TextsInfo", {**fields, **changes})


def status_reply(**changes: Any) -> StatusReply:
    fields: dict[str, Any] = {
        "schema": 1,
        "join": "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F#" + "9f2c" * 8,
        "pid": 4242,
        "uptime_s": 3723.0,
        "tasks": 40,
        "run": run_info(),
        "peer": peer_info(),
        "counters": counters(accumulated_microbatches=55, bytes_sent=123456789),
        "memory": {
            "total": 12_000_000_000,
            "used": 9_000_000_000,
            "held": 3_000_000_000,
            "shortage": "",
            "slots": 8,
            "offloads": False,
        },
        "decision": "accumulating: 9 microbatches of step 3 are missing",
        "rebalancing": "all stages have 2 queued",
        "data": "here: launches microbatches",
        "evaluation": {"step": 2, "loss": 3.4},
        "moves": 0,
        "health": [],
        "compute_stand_in_ms": 0.0,
        "slow_factor": 1.0,
        "dashboard": "http://127.0.0.1:8642/",
        "owner": owner_info(),
        "direct": {"port": 31338, "peers": 3, "local": 1, "why": ""},
        "reach": {"state": "direct", "reason": "2 of 2 peers reached port 31337", "relays": []},
        "relay": {"volunteers": False, "off": "this peer does not volunteer", "reservations": 0, "circuits": 0, "bytes": 0},
        "update": {
            "learning_rate": 0.003,
            "gradient_norm": 2.5,
            "max_gradient_norm": 1.0,
            "loss_scale": None,
            "optimizer": "adamw",
            "optimizer_bits": 32,
            "drift": 2e-7,
        },
        "texts": texts_info(),
        "links": [
            {
                "peer": OTHER,
                "tensor": "activations",
                "codec": "int8",
                "rate": 2.5e6,
                "load": 0.8,
                "reason": "the link is busy 80% of the time",
            }
        ],
    }
    return cast("StatusReply", {**fields, **changes})


def peers_reply(*, num_stages: int = 2, peers_per_stage: int = 2) -> PeersReply:
    stages = [
        {
            "stage": stage,
            "step": 3,
            "missing": 9,
            "queue": 2,
            "throughput": 246.8,
            "peers": [peer_info(stage=stage, id=f"12D3KooW{'x' * 40}{stage}{peer}") for peer in range(peers_per_stage)],
        }
        for stage in range(num_stages)
    ]
    fields: dict[str, Any] = {
        "schema": 1,
        "run": run_info(num_stages=num_stages),
        "work_step": 3,
        "last_loss": 3.21,
        "evaluation": {"step": 2, "loss": 3.4},
        "tokens_per_second": 5120.0,
        "stages": stages,
    }
    return cast("PeersReply", fields)


ME = "12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F"
OTHER = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"


def event_info(number: int, kind: str, **changes: Any) -> EventInfo:
    fields = {"number": number, "time_s": 1.8e9, "kind": kind, "peer": OTHER, "stage": 1, "text": "", **changes}
    return cast("EventInfo", fields)


def history_reply(num_steps: int = 30) -> HistoryReply:
    steps = [{"step": step, "loss": 5.5 - step / 20, "tokens": 8192, "time_s": 1.8e9 + 2 * step} for step in range(num_steps)]
    raised = event_info(2, "raised", peer="", stage=None, text="stage-empty: nobody serves stage 0")
    events = [event_info(1, "joined"), raised]
    return cast("HistoryReply", {"schema": 1, "steps": steps, "events": events})


def contributions_reply(**changes: Any) -> ContributionsReply:
    def row(peer: str, microbatches: int, reporter: str) -> dict[str, Any]:
        return {"peer": peer, "steps": 9, "microbatches": microbatches, "tokens": 512 * microbatches, "reporter": reporter}

    stages = [
        {"stage": 0, "first_step": 0, "last_step": 9, "steps": 10, "peers": [row(ME, 100, ME), row(OTHER, 60, ME)]},
        {"stage": 1, "first_step": 2, "last_step": 9, "steps": 8, "peers": [row(OTHER, 128, OTHER)]},
    ]
    fields: dict[str, Any] = {"schema": 1, "me": ME, "run": "demo", "num_stages": 3, "stages": stages}
    return cast("ContributionsReply", {**fields, **changes})


LIAR, MATE, OTHER = ("12D3KooW" + letter * 44 for letter in "LMN")


def audits_info(**changes: Any) -> AuditsInfo:
    fields: dict[str, Any] = {
        "items": 480,
        "drawn": 14,
        "counts": {"accused": 1, "convicted": 1, "missed": 1, "right": 12},
        "kept": 320,
        "offered": 320,
        "kept_bytes": 1 << 20,
        "most_kept_bytes": 1 << 22,
        "standing": [MATE, OTHER],
        "lost": [LIAR],
        "own_fault": "",
    }
    return cast("AuditsInfo", {**fields, **changes})


def audit_reply(**changes: Any) -> AuditReply:
    item = {"peer": LIAR, "stage": 1, "step": 7, "index": 3}
    judges = [{"peer": peer, "deviation": 2.0, "tolerance": 1e-4, "differs": True} for peer in (MATE, OTHER)]
    fields: dict[str, Any] = {
        "schema": 1,
        "audits": audits_info(),
        "last": [
            {**item, "index": 2, "outcome": "missed", "deviation": None, "reason": "that call is not kept"},
            {**item, "outcome": "convicted", "deviation": 2.0, "reason": ""},
        ],
        "cases": [{**item, "accuser": MATE, "ruling": "convicted", "judges": judges, "losers": [LIAR]}],
    }
    return cast("AuditReply", {**fields, **changes})


def text_reply(**changes: Any) -> TextReply:
    fields: dict[str, Any] = {
        "schema": 1,
        "text": "abc",
        "tokens": 3,
        "reason": "length",
        "steps": [4],
        "peers": [["12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F"]],
        "rerouted": 0,
        "ways": 2,
        "guessed": 4,
        "right": 1,
        "hops": [{"calls": 2, "took_s": 0.2, "waited_s": 0.02, "computed_s": 0.04}],
        "first_s": 0.5,
        "took_s": 1.5,
        "context": 64,
    }
    return cast("TextReply", {**fields, **changes})
