"""One row of the table: what a peer says about itself, and the words used for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, NewType

from peerd.table.forms import FLAG, LEDGER, NAME, NORM, count, many, one_of, optional, raw, real, row, text, whole

MAX_PEERS = 1 << 20
MAX_STAGES = 4096
"""A run may have fewer, and then records name none beyond them."""
MAX_STEP = 1 << 40
MAX_PERIODS = 256
"""No peer counts as live for longer than three times so many announce periods after its last record."""
MAX_THROUGHPUT = 1e9
"""Samples per second of one peer."""
MAX_RATE = 1 << 40
"""Bytes per second of a line."""
MAX_OFFSET, MAX_HEIGHT, MAX_ERROR = (1 << 15) - 1, (1 << 16) - 1, 2000
"""Of a coordinate, in its units."""
MAX_LOSS = 1e30
"""Nats per token. A run that diverges may come near it."""
MAX_BACKLOG = float(1 << 20)
MAX_STAY_HOURS = 1 << 17
COIN_BYTES = 32
"""Bytes of a secret of an auditor's coins, and of the head of a chain of them."""
MAX_ASIDES = 3
"""A peer has memory for so many: that of a round, which it does not need meanwhile."""
MAX_DRIFT = 1e3
MAX_SIDELINED = 8
"""Number of mates that one peer can leave out."""
MAX_KEPT_STEPS = 8
"""Number of finished steps whose norm or tied sum is read from a record."""

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58; it embeds the peer's Ed25519 public key."""

RunId = NewType("RunId", str)

AverageId = NewType("AverageId", bytes)
"""Hash of a round's step, stage, roster and attempt. Empty: no average."""

NO_AVERAGE = AverageId(b"")
PEER = text(64)
STEP = count(MAX_STEP)
AVERAGE = raw(16)

RawRecord = tuple[bytes, bytes]
"""A record as it travels: its body and its signature. Nothing in it is to be believed before it is read."""

NO_RECORD: RawRecord = (b"", b"")


class Phase(enum.IntEnum):
    """Where a peer is in the life of a step. `TRANSITIONS` lists the moves."""

    JOINING = 0
    ACCUMULATING = 1
    AVERAGING = 2
    AVERAGED = 3


class Reach(enum.IntEnum):
    """How others reach a peer, by the answers of those that it asked."""

    UNKNOWN = 0
    DIRECT = 1
    RELAYED = 2
    CLIENT = 3
    """Others reach it only over connections that it has opened itself."""


HIDDEN = (Reach.RELAYED, Reach.CLIENT)
"""Peers that nobody can dial."""


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # a joiner serves once its state is the stage's
    Phase.JOINING: frozenset({Phase.ACCUMULATING}),
    # to AVERAGED without a round when a mate's average is adopted; back to JOINING to download state again
    Phase.ACCUMULATING: frozenset({Phase.AVERAGING, Phase.AVERAGED, Phase.ACCUMULATING, Phase.JOINING}),
    # back to ACCUMULATING when the round failed, the ledger kept
    Phase.AVERAGING: frozenset({Phase.AVERAGED, Phase.ACCUMULATING, Phase.JOINING}),
    # to ACCUMULATING at the next step by the commit; to itself when a smaller average is adopted
    Phase.AVERAGED: frozenset({Phase.ACCUMULATING, Phase.AVERAGED, Phase.JOINING}),
}


def check_transition(old: Phase, new: Phase) -> None:
    """An illegal move is a bug of ours, never a peer's doing."""
    if new not in TRANSITIONS[old]:
        raise AssertionError(f"illegal phase transition {old.name} -> {new.name}")


@dataclass(frozen=True, slots=True, order=True)
class Lineage:
    """What a peer's parameters descend from: smaller is better (fewer inexact steps), ties broken by the hash chain."""

    inexact: int = 0
    chain: bytes = b""


LINEAGE = row(Lineage, count(), raw(32))


@dataclass(frozen=True, slots=True)
class Suspicion:
    """`peer` did not answer a re-dial; holds until its (incarnation, version) rises above this pair."""

    peer: PeerId
    incarnation: int
    version: int


SUSPICION = row(Suspicion, PEER, count(), count())


@dataclass(frozen=True, slots=True)
class Aside:
    """A part of a ledger that is summed by itself: microbatches that another peer may hold as well, and that can be given up alone."""

    other: PeerId
    """That peer; empty where it is not known which."""
    done: int


ASIDE = row(Aside, PEER, LEDGER)


@dataclass(frozen=True, slots=True)
class Void:
    """`peer` cannot take part in rounds of `step` (it and another member cannot reach each other): hole 19 (unreachable pair)."""

    peer: PeerId
    incarnation: int
    step: int


VOID = row(Void, PEER, count(), STEP)


@dataclass(frozen=True, slots=True)
class StepNorm:
    """The whole model's gradient norm of a finished step, as it was applied; infinite where the step changed no parameter."""

    step: int
    norm: float


STEP_NORM = row(StepNorm, STEP, NORM)


@dataclass(frozen=True, slots=True)
class TiedSum:
    """The sum of both stages' gradients of a tied weight with which a step was finished (policy/step/tied.py)."""

    step: int
    id: AverageId


TIED_SUM = row(TiedSum, STEP, AVERAGE)


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Where a peer is in the network: the round trip between two peers is the distance of their points plus both heights.

    `x`, `y` and `height` are in tenths of a millisecond; the height is what the access line adds. `error` is in thousandths.
    """

    x: int
    y: int
    height: int
    error: int


COORDINATE = row(Coordinate, whole(MAX_OFFSET), whole(MAX_OFFSET), count(MAX_HEIGHT), count(MAX_ERROR))


@dataclass(frozen=True, slots=True, order=True)
class Evaluation:
    """The mean loss, nats per token, on the evaluation tokens with the parameters that `step` updates lie behind."""

    step: int
    loss: float


EVALUATION = row(Evaluation, STEP, real(MAX_LOSS))


def believable_loss(loss: float) -> float:
    """A finite loss within the bounds that other peers believe: rounding may leave a mean just below 0."""
    return min(max(loss, 0.0), MAX_LOSS)


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A whole stage in a few numbers, told by one of its peers to peers of a large swarm that do not know the stage."""

    peers: int
    """Number of peers that serve the stage."""
    trainers: int
    queue: int
    throughput: float
    """Samples per second, of all peers; those that leave left out."""
    held: int
    """Union of the members' ledgers at the step of the record that says so."""
    next_held: int = 0
    """The same for the next step, where steps overlap."""


SUMMARY = row(StageSummary, count(MAX_PEERS), count(MAX_PEERS), count(1 << 40), real(MAX_PEERS * MAX_THROUGHPUT), LEDGER, LEDGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """The fields of a record that are measured, not decided. PeerRecord says what the numbers mean."""

    addresses: Annotated[tuple[str, ...], 3, many(text(256), 8)] = ()
    leaving: Annotated[bool, 11, FLAG] = False
    trains: Annotated[bool, 12, FLAG] = False
    """This peer runs a trainer: it has the run's data."""
    trains_from: Annotated[int, 13, STEP] = 0
    """The first step at which its trainer owns microbatches: a newcomer must not launch what others have in flight."""
    queue: Annotated[int, 18, count(1 << 20)] = 0
    in_flight: Annotated[int, 19, count(1 << 20)] = 0
    throughput: Annotated[float, 20, real(MAX_THROUGHPUT)] = 0.0
    """Samples per second, moving average: what it computes, or less where its line is known to carry less."""
    tokens: Annotated[int, 21, count()] = 0
    last_loss: Annotated[float | None, 22, optional(real(MAX_LOSS))] = None
    """Mean loss of the step before `step`."""
    evaluation: Annotated[Evaluation | None, 23, optional(EVALUATION)] = None
    """The newest evaluation that this peer has made or believes."""
    evaluated: Annotated[Evaluation | None, 50, optional(EVALUATION)] = None
    """The newest evaluation that this peer has made itself."""
    software: Annotated[str, 24, text(64)] = ""
    device: Annotated[str, 25, text(64)] = ""
    memory_bytes: Annotated[int, 26, count()] = 0
    kept_averages: Annotated[int, 35, count()] = 0
    """The number of steps before `step` whose averages this peer can give, without a gap."""
    diverged_at: Annotated[int | None, 33, optional(STEP)] = None
    """The step of which this peer's trainer got values that are not finite, whichever way it tried."""
    sidelined: Annotated[tuple[PeerId, ...], 36, many(PEER, MAX_SIDELINED)] = ()
    """Mates that this peer leaves out, because rounds have waited for them in vain."""
    up: Annotated[int, 37, count(MAX_RATE)] = 0
    """Bytes per second of its uplink, measured while something was under way (policy/round/line_rates.py). 0: unknown."""
    down: Annotated[int, 37, count(MAX_RATE)] = 0
    """The same of its downlink."""
    unaveraged: Annotated[int, 38, count(MAX_STEP)] = 0
    """In how many steps in a row it had work, and its gradients were in no average (policy/step/contributions.py)."""
    coordinate: Annotated[Coordinate | None, 40, optional(COORDINATE)] = None
    """Where the peer is in the network, by the round trips that it has measured (policy/swarm/coordinates.py). None: not known yet."""
    computes: Annotated[float, 41, real(MAX_THROUGHPUT)] = 0.0
    """Samples per second that it would do on any line. 0: its line is not known well enough, and `throughput` says what it computes."""
    backlog: Annotated[float, 42, real(MAX_BACKLOG)] = 0.0
    """Microbatches that waited for its processor or its uplink, on average over the last rebalancing period."""
    stays_hours: Annotated[int, 43, count(MAX_STAY_HOURS)] = 0
    """How long its owner still means to let it run, in hours, rounded up. 0: not said, or over."""
    coins: Annotated[bytes, 47, raw(2 * COIN_BYTES)] = b""
    """Where peers audit each other: what binds it to the coins of its audits, of this period and the next (policy/step/coins.py)."""
    paused: Annotated[bool, 45, FLAG] = False
    """It leaves its stage because it is paused, and comes back when the pause ends. It is told only together with `leaving`."""
    nickname: Annotated[str, 46, NAME] = ""
    """What its owner calls it. Anybody may take any name; only the id says who a peer is."""
    team: Annotated[str, 46, NAME] = ""
    unlisted: Annotated[bool, 49, FLAG] = False
    """Its owner wants it named in no table of who computed how much (policy/step/leaderboard.py)."""
    drift: Annotated[float, 48, real(MAX_DRIFT)] = 0.0
    """How far its parameters were off their mean over its stage when averaged last, as a share of their norm. 0: never, or equal."""
    reach: Annotated[Reach, 30, one_of(Reach)] = Reach.UNKNOWN
    relays: Annotated[bool, 30, FLAG] = False
    """This peer volunteers as a relay, and has not stopped."""

    def measured(self) -> dict[str, Any]:
        """These fields by name."""
        return {name: getattr(self, name) for name in Vitals.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord(Vitals):
    """A peer's row. Signed on the wire; per peer the highest (incarnation, version) wins.

    A record travels as a list. Each field names its place in it and its form. Every record has the places below 27. A later place
    holds a list of the fields that name it; it is null, or left out at the end, where all of them have their defaults.
    """

    peer: Annotated[PeerId, 0, PEER]
    incarnation: Annotated[int, 1, count()] = 0
    version: Annotated[int, 2, count()] = 0
    stage: Annotated[int, 4, count(MAX_STAGES - 1)] = 0
    step: Annotated[int, 5, STEP] = 0
    phase: Annotated[Phase, 6, one_of(Phase)] = Phase.JOINING
    done: Annotated[int, 7, LEDGER] = 0
    """Bitmap: bit i is set when this peer's accumulator holds the gradient of microbatch i of `step`."""
    ledger_no: Annotated[int, 8, count()] = 0
    average_id: Annotated[AverageId, 9, AVERAGE] = NO_AVERAGE
    lineage: Annotated[Lineage, 10, LINEAGE] = Lineage()
    suspects: Annotated[tuple[Suspicion, ...], 14, many(SUSPICION)] = ()
    voids: Annotated[tuple[Void, ...], 15, many(VOID)] = ()
    checkpoints: Annotated[tuple[int, ...], 16, many(STEP)] = ()
    """The steps of its stage that a joiner holds on disk; empty once it serves."""
    gives_start: Annotated[bool, 17, FLAG] = False
    """This peer holds the state of every stage that the run begins from."""
    gradient_norm: Annotated[float | None, 27, optional(NORM)] = None
    """The norm of this peer's average. Known while AVERAGED where the run shares norms; infinite where a gradient overflowed."""
    norms: Annotated[tuple[StepNorm, ...], 27, many(STEP_NORM, MAX_KEPT_STEPS)] = ()
    """The norms of the last finished steps, where the run shares norms: peers that are behind apply the same."""
    next_done: Annotated[int, 28, LEDGER] = 0
    """As `done`, for the next step: the microbatches computed while `step` is averaged, where updates are delayed."""
    next_ledger_no: Annotated[int, 28, count()] = 0
    """The number of the ledger in `next_done`. 0: there is none, and a step begins when the one before is applied."""
    tied_sum: Annotated[AverageId, 29, AVERAGE] = NO_AVERAGE
    """The sum of a tied weight's gradients at `step`. Known while AVERAGED, once this peer has it."""
    tied_sums: Annotated[tuple[TiedSum, ...], 29, many(TIED_SUM, MAX_KEPT_STEPS)] = ()
    """The sums of the last finished steps, as far as this peer keeps them: peers that are behind apply the same."""
    tied: Annotated[Lineage, 29, LINEAGE] = Lineage()
    """What this peer's copy of a tied weight descends from."""
    periods: Annotated[int, 31, count(MAX_PERIODS, least=1)] = 1
    """This peer announces itself at least once in so many announce periods, and its record lives three times as long."""
    summary: Annotated[StageSummary | None, 31, optional(SUMMARY)] = None
    """The summary of its stage, where this peer speaks for the stage."""
    asides: Annotated[tuple[Aside, ...], 32, many(ASIDE, MAX_ASIDES)] = ()
    """Disjoint parts of `done`; the one that grew last is the last."""
    next_asides: Annotated[tuple[Aside, ...], 32, many(ASIDE, MAX_ASIDES)] = ()
    """Those of `next_done`."""
    group: Annotated[AverageId, 39, AVERAGE] = NO_AVERAGE
    """The round whose sum `done` describes, which others of its group hold as well; empty: this peer's own gradients."""
    own_done: Annotated[int, 39, LEDGER] = 0
    """What this peer itself has computed of the group's sum. It counts for contributions alone."""
    sections: Annotated[int, 39, LEDGER] = 0
    """Bitmap: the sections of the step's average that this peer holds and gives to mates, where its stage averages by sections."""
    invitation: Annotated[bytes, 44, raw(72)] = b""
    """In a run by invitation: what the organiser has signed to let this peer in (config/access.py)."""
    unreached: Annotated[tuple[PeerId, ...], 34, many(PEER)] = ()
    """Peers that have not answered since a call to them and a re-dial failed. One that is live has a link that is dead in one direction."""

    @property
    def worth(self) -> tuple[int, Lineage, bytes]:
        """The order of two states of a stage at one step: the smaller one wins. Without tied weights it is the order of the lineages."""
        return (self.lineage.inexact, self.tied, self.lineage.chain)

    @property
    def is_reliable(self) -> bool:
        """Whether it means to stay: policy/swarm/reliable.py says what follows from it."""
        return self.stays_hours > 0 and not self.leaving

    @property
    def pair(self) -> tuple[int, int]:
        return (self.incarnation, self.version)
