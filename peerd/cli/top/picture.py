"""The values that the screen shows, from a poll and what is remembered. Text from peers is stripped of control characters here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from peerd.cli.render import (
    AT_WORK_FROM_S,
    connections_of,
    exactness,
    held_by,
    line_in_words,
    local_batch_at,
    name_of,
    own_updates,
    phase_of,
    plain,
    short_id,
)
from peerd.cli.render_status import computing_row, joining_row, texts_rows
from peerd.cli.top.ink import amount, duration, fixed
from peerd.cli.top.recall import EventLine, Poll, Recall
from peerd.control.protocol import HealthItem, PeerInfo, StageInfo

UNFOLDED_UP_TO, OWN_UNFOLDED_UP_TO = 60, 20
"""Numbers of peers. A larger swarm is folded at first, but for a small stage of this daemon: a large one would hide the others."""

_PATHS = {
    "local": "local: tensors go to it over a socket on this machine",
    "direct": "direct: tensors go to it by TLS",
    "quic": "quic: tensors go to it through the routers of both, by TLS in QUIC",
    "tunnel": "tunnel: libp2p carries tensors to it",
    "relay": "relay: another peer carries tensors to it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    stage: int
    step: int
    phase: str
    done: int
    queue: int
    throughput: float
    num_peers: int
    """More than there are rows in a large swarm."""
    num_doubtful: int
    """Peers that are suspect or leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    peer: PeerInfo
    name: str
    own_name: str
    """What it calls itself; empty: nothing."""
    phase: str
    mine: bool


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage and its peers, this daemon first."""

    row: StageRow
    peers: tuple[PeerRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Everything that the screen shows at one time."""

    pid: int
    """Process id of the daemon that answered."""
    run: str
    step: int | None
    """The step that the swarm works on; if a stage has no peer, this daemon's step."""
    last_step: int
    """The run's last step; 0 if it has no end."""
    num_microbatches: int
    loss: float | None
    """The last known loss, even if no peer reports one any more. Where steps are local, an evaluation's: that of the average."""
    tokens_per_second: float
    losses: tuple[float, ...]
    speeds: tuple[float, ...]
    step_span: str
    stages: tuple[StagePart, ...]
    greatest_queue: int
    own: tuple[tuple[str, str], ...]
    health: tuple[HealthItem, ...]
    events: tuple[EventLine, ...]
    uptime: str
    my_stage: int
    paused: bool
    """True if the daemon pauses or is about to."""

    @property
    def num_peers(self) -> int:
        return sum(stage.row.num_peers for stage in self.stages)

    @property
    def has_names(self) -> bool:
        """Whether a peer calls itself something."""
        return any(row.own_name for part in self.stages for row in part.peers)

    def folded_at_first(self) -> frozenset[int]:
        if sum(len(stage.peers) for stage in self.stages) <= UNFOLDED_UP_TO:
            return frozenset()
        own = {part.row.stage for part in self.stages if part.row.stage == self.my_stage and len(part.peers) <= OWN_UNFOLDED_UP_TO}
        return frozenset(part.row.stage for part in self.stages) - own

    def peer(self, name: str) -> PeerInfo | None:
        """The peer with this id, if it is in the picture."""
        return next((row.peer for part in self.stages for row in part.peers if row.peer["id"] == name), None)


def picture_of(poll: Poll, recall: Recall) -> Picture:
    status, peers, run = poll.status, poll.peers, poll.peers["run"]
    mine = frozenset(each["peer"]["id"] for each in poll.own)
    stages = tuple(_part(stage, run["microbatches_per_step"], mine) for stage in peers["stages"])
    step = peers["work_step"] if peers["work_step"] is not None else status["peer"]["step"] or None
    local_batch = local_batch_at(run, step)
    losses = tuple((recall.evaluations if local_batch else recall.losses).values())
    of_step = peers["last_loss"] if peers["last_loss"] is not None and not local_batch else None
    return Picture(
        pid=status["pid"],
        paused=bool(status["owner"]["paused"]),
        run=plain(run["name"], 64),
        step=step,
        last_step=run["steps"],
        num_microbatches=run["microbatches_per_step"],
        loss=of_step if of_step is not None else losses[-1] if losses else None,
        tokens_per_second=peers["tokens_per_second"],
        losses=losses,
        speeds=tuple(recall.speeds.values()),
        step_span="; ".join(filter(None, (_evaluated(poll), _span_of(recall, "within steps " if local_batch else "")))),
        stages=stages,
        greatest_queue=max((row.peer["queue"] for part in stages for row in part.peers), default=0),
        own=tuple(_own(poll, recall)),
        health=tuple(_health(poll)),
        events=recall.events,
        uptime=duration(status["uptime_s"]),
        my_stage=status["peer"]["stage"],
    )


def _span_of(recall: Recall, before: str) -> str:
    """The range of the losses and of their steps, in words; `before` says of which losses."""
    losses = recall.losses
    if len(losses) < 2:
        return "".join(f"step {step}" for step in losses)
    low, high = min(losses.values()), max(losses.values())
    return f"{before}{fixed(low)} to {fixed(high)}, steps {min(losses)}-{max(losses)}"


def _evaluated(poll: Poll) -> str:
    evaluation = poll.peers.get("evaluation")
    if local_batch_at(poll.peers["run"], poll.peers["work_step"]):
        return f"averaged parameters at step {evaluation['step']}" if evaluation else "averaged parameters: not evaluated"
    return f"evaluation {fixed(evaluation['loss'])} at {evaluation['step']}" if evaluation else ""


def _part(stage: StageInfo, num_microbatches: int, mine: frozenset[str]) -> StagePart:
    peers = [
        PeerRow(peer=peer, name=short_id(peer["id"]), own_name=name_of(peer), phase=phase_of(peer), mine=peer["id"] in mine)
        for peer in stage["peers"]
    ]
    peers.sort(key=lambda row: not row.mine)
    row = StageRow(
        stage=stage["stage"],
        step=stage["step"],
        phase=_phase(stage),
        done=num_microbatches - stage["missing"] if peers else 0,
        queue=stage["queue"],
        throughput=stage["throughput"],
        num_peers=max(len(peers), stage.get("num_peers", 0)),
        num_doubtful=sum(peer["suspect"] or peer["leaving"] for peer in stage["peers"]),
    )
    return StagePart(row, tuple(peers))


def _phase(stage: StageInfo) -> str:
    """The most common phase of a stage's peers at its step."""
    phases = Counter(plain(peer["phase"], 12) for peer in stage["peers"] if peer["step"] == stage["step"] and not peer["suspect"])
    return phases.most_common(1)[0][0] if phases else "nobody"


def _own(poll: Poll, recall: Recall) -> Iterator[tuple[str, str]]:
    """Name and value of each row about this daemon."""
    status = poll.status
    peer, counters, rates = status["peer"], status["counters"], recall.bytes_per_second()
    moves = {0: "", 1: ", moved once"}.get(status["moves"], f", moved {status['moves']} times")
    yield "you", _place(peer) + moves
    for device, other in poll.further.items():
        yield plain(device, 9), "does not answer" if other is None else _place(other["peer"])
    yield from computing_row(status)
    yield from joining_row(status)
    if (texts := status.get("texts")) and texts["answering"]:
        yield from texts_rows(status)
    if local_batch := local_batch_at(status["run"], peer["step"]):
        yield "local", own_updates(counters, local_batch)
    given = f"{amount(math.fsum(each['peer']['tokens'] for each in poll.own))} tokens{_share(poll)}"
    yield "gave", f"{given}; traffic {amount(rates[0])}B/s out, {amount(rates[1])}B/s in"
    yield "exact", f"{exactness(counters)}; relaunched {counters['replayed_microbatches']}, faults {counters['faults_seen']}"
    yield "decision", plain(status["decision"])
    yield "rebalance", plain(status["rebalancing"])


def _place(peer: PeerInfo) -> str:
    return f"{short_id(peer['id'])}, stage {peer['stage']}, {phase_of(peer)} at step {peer['step']}"


def _share(poll: Poll) -> str:
    """The share of this machine's daemons in the tokens of all present peers, in words."""
    tokens = [peer["tokens"] for stage in poll.peers["stages"] for peer in stage["peers"]]
    total = math.fsum(tokens)
    mine = math.fsum(each["peer"]["tokens"] for each in poll.own)
    share = min(1.0, mine / total) if total > 0 else 0.0
    return f" ({share:.0%} of those here)" if share >= 0.1 else f" ({share:.1%} of those here)"


def _health(poll: Poll) -> Iterator[HealthItem]:
    """What is to be known of each own daemon; those of further devices with the device's name."""
    for device, status in (("", poll.status), *poll.further.items()):
        before = f"{plain(device, 9)}: " if device else ""
        for item in status["health"] if status is not None else ():
            title, severity = f"{before}{plain(item['title'])}", plain(item["severity"], 12)
            yield HealthItem(code=item["code"], title=title, severity=severity, remedy=plain(item["remedy"]))


def _takes(peer: PeerInfo) -> str:
    """How long a microbatch takes, where that is long."""
    took_s = peer.get("microbatch_s", 0.0)
    return f", {duration(took_s)} a microbatch" if took_s >= AT_WORK_FROM_S else ""


def details_of(peer: PeerInfo, num_microbatches: int) -> tuple[tuple[str, str], ...]:
    """Name and value of each row about a peer, from its record."""
    addresses = [plain(address) for address in peer["addresses"]] or ["none: it cannot be called"]
    line = line_in_words(peer.get("up", 0), peer.get("down", 0))
    return (
        ("id", plain(peer["id"])),
        *([("name", name_of(peer))] if name_of(peer) else []),
        ("stage", f"{peer['stage']}, at step {peer['step']}"),
        ("phase", phase_of(peer) if phase_of(peer) == peer["phase"] else f"{phase_of(peer)}, {plain(peer['phase'], 12)}"),
        ("done", f"{held_by(peer)} of {num_microbatches} microbatches of its step" + (" and the next" if peer.get("next_done") else "")),
        ("queue", f"{peer['queue']} waiting, {peer['in_flight']} in flight"),
        ("speed", f"{amount(peer['throughput'])} samples/s" + _takes(peer)),
        ("gave", f"{amount(peer['tokens'])} tokens"),
        ("loss", fixed(peer["last_loss"])),
        ("device", f"{plain(peer['device'], 40)}, {amount(peer['memory_bytes'])}B of memory"),
        ("software", plain(peer["software"], 60)),
        ("record", f"{duration(peer['age_s'])} old, incarnation {peer['incarnation']}, {peer['inexact']} steps inexact"),
        ("reach", plain(peer.get("reach", "unknown"), 12) + (", relays for others" if peer.get("relays") else "")),
        *([("line", f"{line}, as it measured")] if line else []),
        *([("path", _PATHS.get(peer["path"], plain(peer["path"], 12)) + connections_of(peer))] if "path" in peer else []),
        *(("address" if index == 0 else "", address) for index, address in enumerate(addresses)),
    )
