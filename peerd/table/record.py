"""One row of the table: what a peer says about itself, and the words used for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58; it embeds the peer's Ed25519 public key."""

RunId = NewType("RunId", str)

AverageId = NewType("AverageId", bytes)
"""Hash of a round's step, stage, roster and attempt. Empty: no average."""

NO_AVERAGE = AverageId(b"")


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
    """How others reach a peer, as those found whom it asked."""

    UNKNOWN = 0
    DIRECT = 1
    RELAYED = 2
    CLIENT = 3
    """Not at all: only over connections that it has opened itself."""


HIDDEN = (Reach.RELAYED, Reach.CLIENT)
"""Nobody can dial them."""


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


@dataclass(frozen=True, slots=True)
class Suspicion:
    """`peer` did not answer a re-dial; holds until its (incarnation, version) rises above this pair."""

    peer: PeerId
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class Void:
    """`peer` cannot take part in rounds of `step` (it and another member cannot reach each other): hole 19 (unreachable pair)."""

    peer: PeerId
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class StepNorm:
    """The whole model's gradient norm of a finished step, as it was applied; infinite where the step changed no parameter."""

    step: int
    norm: float


@dataclass(frozen=True, slots=True)
class TiedSum:
    """The sum of both stages' gradients of a tied weight with which a step was finished (policy/step/tied.py)."""

    step: int
    id: AverageId


@dataclass(frozen=True, slots=True, order=True)
class Evaluation:
    """The mean loss, nats per token, on the evaluation tokens with the parameters that `step` updates lie behind."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """A whole stage in a few numbers, by one of its own peers, for those in a large swarm who know no more of it."""

    peers: int
    """Those that serve."""
    trainers: int
    queue: int
    throughput: float
    """Samples per second, of all peers; those that leave left out."""
    held: int
    """Union of the members' ledgers at the step of the record that says so."""
    next_held: int = 0
    """Of those of the step after it, where steps overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """A peer's row. Signed on the wire; per peer the highest (incarnation, version) wins."""

    peer: PeerId
    incarnation: int = 0
    version: int = 0
    addresses: tuple[str, ...] = ()
    reach: Reach = Reach.UNKNOWN
    relays: bool = False
    """Volunteers as a relay, and has not stopped."""
    stage: int = 0
    step: int = 0
    phase: Phase = Phase.JOINING
    done: int = 0
    """Bitmap: bit i is set when this peer's accumulator holds the gradient of microbatch i of `step`."""
    ledger_no: int = 0
    next_done: int = 0
    """As `done`, of the step after `step`: what is computed of it while `step` is averaged, where updates are delayed."""
    next_ledger_no: int = 0
    """Of the ledger that `next_done` spells out; 0: there is none, and a step begins when the one before is applied."""
    average_id: AverageId = NO_AVERAGE
    lineage: Lineage = Lineage()
    gradient_norm: float | None = None
    """Of my average, while AVERAGED and where the run shares norms; infinite where a gradient overflowed."""
    norms: tuple[StepNorm, ...] = ()
    """Of the last steps I finished, where the run shares norms: those behind me apply the same."""
    tied_sum: AverageId = NO_AVERAGE
    """Of a tied weight's gradients at my step, while AVERAGED and once I have it."""
    tied_sums: tuple[TiedSum, ...] = ()
    """Of the last steps I finished, as far as I keep them: those behind me apply the same."""
    tied: Lineage = Lineage()
    """What my copy of a tied weight descends from."""
    leaving: bool = False
    trains: bool = False
    """Runs a trainer (has the run's data)."""
    trains_from: int = 0
    """First step at which its trainer owns microbatches: a newcomer must not launch what others have in flight."""
    suspects: tuple[Suspicion, ...] = ()
    voids: tuple[Void, ...] = ()
    checkpoints: tuple[int, ...] = ()
    """Steps of its stage that a joiner holds on disk; empty once it serves."""
    gives_start: bool = False
    """Holds the state that the run begins from, of every stage."""
    queue: int = 0
    in_flight: int = 0
    throughput: float = 0.0
    """Samples per second, moving average."""
    tokens: int = 0
    last_loss: float | None = None
    """Mean loss of the step before `step`."""
    evaluation: Evaluation | None = None
    """The newest that this peer has made or heard of."""
    software: str = ""
    device: str = ""
    memory_bytes: int = 0
    periods: int = 1
    """It announces itself at least once in so many announce periods, and lives three times as long."""
    summary: StageSummary | None = None
    """Of its stage, where this peer speaks for it."""

    @property
    def worth(self) -> tuple[int, Lineage, bytes]:
        """Of two states of a stage at one step the smaller is everybody's; in a run that ties nothing it goes by lineage alone."""
        return (self.lineage.inexact, self.tied, self.lineage.chain)

    @property
    def pair(self) -> tuple[int, int]:
        return (self.incarnation, self.version)
