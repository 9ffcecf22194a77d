"""Strategies for any reply within the protocol's types: hostile names, absurd numbers, any shape of swarm."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import strategies as st

from peerd.cli.top.recall import Poll
from peerd.control.protocol import EventInfo, HealthItem, PeerInfo, PeersReply, StatusReply, StepInfo
from tests.cli.replies import counters, peer_info, run_info, status_reply

counts = st.one_of(st.integers(0, 40), st.integers(0, 10**30))
numbers = st.one_of(st.floats(0, 1e4), st.floats(allow_nan=True, allow_infinity=True))
words = st.one_of(st.text(max_size=12), st.text(max_size=300), st.sampled_from(["\x1b[2J", "\u202e" * 9, "\u4e2d" * 90, "e\u0301" * 50]))
names = st.one_of(st.text(min_size=1, max_size=80), st.integers(0, 10**6).map(lambda number: f"12D3KooW{number:044}"))


@st.composite
def peers(draw: st.DrawFn, stage: int) -> PeerInfo:
    return peer_info(
        id=draw(names),
        stage=stage,
        step=draw(counts),
        phase=draw(st.sampled_from(["joining", "accumulating", "averaging", "averaged", "\x07"])),
        leaving=draw(st.booleans()),
        suspect=draw(st.booleans()),
        queue=draw(counts),
        in_flight=draw(counts),
        done=draw(counts),
        next_done=draw(counts),
        throughput=draw(numbers),
        tokens=draw(counts),
        last_loss=draw(st.none() | numbers),
        nickname=draw(words),
        team=draw(words),
        device=draw(words),
        memory_bytes=draw(counts),
        software=draw(words),
        addresses=draw(st.lists(words, max_size=3)),
        age_s=draw(numbers),
        **draw(
            st.sampled_from(["", "local", "direct", "quic", "tunnel", "relay", "\x1b[2J" * 9]).map(
                lambda path: {"path": path} if path else {}
            )
        ),
    )


@st.composite
def peers_replies(draw: st.DrawFn) -> PeersReply:
    """1 to 64 stages with a few peers drawn one by one, and up to 1,000 generated ones."""
    num_stages = draw(st.sampled_from([1, 2, 3, 64]))
    stages = []
    for stage in range(num_stages):
        drawn = draw(st.lists(peers(stage), max_size=3 if num_stages < 64 else 1, unique_by=lambda peer: peer["id"]))
        stages.append({"stage": stage, "step": draw(counts), "missing": draw(counts), "queue": 0, "throughput": 0.0, "peers": drawn})
    more = draw(st.sampled_from([0, 0, 0, 1000]))
    for number in range(more):
        stage_of = number % num_stages
        cast("list[Any]", stages[stage_of]["peers"]).append(
            peer_info(id=f"12D3KooW{'m' * 38}{number:06}", stage=stage_of, queue=number % 30)
        )
    reply = {
        "schema": 1,
        "run": run_info(
            name=draw(words),
            num_stages=num_stages,
            steps=draw(counts),
            microbatches_per_step=draw(st.integers(1, 8192)),
            local_batch=draw(st.sampled_from([0, 0, 8, 8192])),
        ),
        "evaluation": draw(st.none() | st.fixed_dictionaries({"step": counts, "loss": numbers})),
        "work_step": draw(st.none() | counts),
        "last_loss": draw(st.none() | numbers),
        "tokens_per_second": draw(numbers),
        "stages": stages,
    }
    return cast("PeersReply", reply)


@st.composite
def status_replies(draw: st.DrawFn, swarm: PeersReply) -> StatusReply:
    everybody = [peer for stage in swarm["stages"] for peer in stage["peers"]]
    severities = st.sampled_from(["info", "warning", "problem", "\x1b"])
    health = [
        HealthItem(code="c", title=draw(words), severity=draw(severities), remedy=draw(words)) for _ in range(draw(st.integers(0, 3)))
    ]
    return status_reply(
        pid=draw(st.integers(1, 2)),
        uptime_s=draw(numbers),
        peer=draw(st.sampled_from(everybody)) if everybody else peer_info(),
        counters=counters(bytes_sent=draw(counts), bytes_received=draw(counts), accumulated_microbatches=draw(counts)),
        decision=draw(words),
        rebalancing=draw(words),
        moves=draw(counts),
        health=health,
    )


def step_infos() -> st.SearchStrategy[StepInfo]:
    fields = {"step": counts, "loss": numbers, "tokens": counts, "time_s": numbers}
    return cast("st.SearchStrategy[StepInfo]", st.fixed_dictionaries(fields))


def event_infos() -> st.SearchStrategy[EventInfo]:
    kinds = st.sampled_from(["started", "joined", "left", "gone", "moved", "suspect", "back", "leaving", "raised"]) | words
    fields = {"number": counts, "time_s": st.floats(0, 1e10), "kind": kinds, "peer": names, "stage": st.none() | counts, "text": words}
    return cast("st.SearchStrategy[EventInfo]", st.fixed_dictionaries(fields))


@st.composite
def polls(draw: st.DrawFn) -> Poll:
    swarm = draw(peers_replies())
    steps = tuple(draw(st.lists(step_infos(), max_size=8)))
    at_s = draw(st.floats(0, 1e6))
    return Poll(
        at_s=at_s, status=draw(status_replies(swarm)), peers=swarm, steps=steps, events=tuple(draw(st.lists(event_infos(), max_size=8)))
    )
