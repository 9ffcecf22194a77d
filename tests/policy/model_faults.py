"""Faults as data: what happens to whom and when, drawn from a seed. Part of the protocol model."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    KILL = "kill"
    RESTART = "restart"
    """Killed, and started again with the same identity."""
    RESTART_BLANK = "restart blank"
    """Killed, and started again with the same key but without the stored incarnation."""
    SLEEP = "sleep"
    """Stopped for a while like SIGSTOP; then wakes with all that was sent to it meanwhile."""
    JOIN = "join"
    LEAVE = "leave"
    MIGRATE = "migrate"
    """Leaves its stage as a mover does, and joins another one with a new incarnation."""
    BAN = "ban"
    """The organiser bans it: each other peer hears that soon, and the peer itself after a while; then it ends."""
    BLACKOUT = "blackout"
    """Everybody is killed; two thirds come back, in any order, with nothing but what is on their disks."""
    STAGE_WIPED = "stage wiped"
    """All peers of one stage are killed; two thirds come back, in any order, with nothing but what is on their disks."""
    STALE_MATES = "stale mates"
    """One peer of a stage trains on while its mates sleep; it pauses as they wake, and comes back with what is on its disk."""
    SUSPECT = "suspect"
    """Somebody wrongly suspects somebody."""
    LOSS = "loss"
    """The network loses a part of all messages for a while."""
    CUT = "cut"
    """Two peers cannot reach each other for a while."""
    ONE_WAY = "one way"
    """What one peer sends to another is lost for a while; what it is sent arrives."""
    NO_CALLS = "no calls"
    """One peer's calls to another fail for a while; the other's calls to it work, and their replies come back."""
    CANCELLED = "cancelled"
    """For a while a peer's handlers of proposals are cancelled, between any two of their awaits."""
    SLOW = "slow"
    """A peer computes ten times slower for a while."""
    THIN = "thin"
    """For a while the averages that a peer fetches from mates take long to arrive."""
    DRIP = "drip"
    """For a while a peer's uplink is so slow that its part of an average takes several averaging times."""
    OVERFLOW = "overflow"
    """For a while what a peer computes is not finite."""
    BOAST = "boast"
    """For a while a peer's record says that it is ten steps further, but it gives no such state."""
    ACCUSE = "accuse"
    """For a while a peer's record suspects everybody, up to the highest version."""
    CONTRADICT = "contradict"
    """For a while a peer's record tells one half of the peers that it has done everything, and the other half nothing, in one version."""
    SILENT = "silent"
    """For a while a peer does its share, answers no proposal and proposes nothing."""
    ABSORBED = "absorbed"
    """For a while a peer does its share, joins no round, and says that it is in one."""
    FLAP = "flap"
    """For a while a peer does its share, and says again and again that it is in a round, each time for a moment less than others wait."""
    BLINK = "blink"
    """For a while a peer proposes nothing, and says again and again for a moment that it is in a round."""
    MUTE = "mute"
    """For a while a peer proposes nothing."""
    LAG = "lag"
    """For a while a peer that has the average of the step says that it is still on its way."""
    FRAME = "frame"
    """For a while a peer says that all others are to be left out, and where it leads it never asks one of them."""
    VOID = "void"
    """For a while a peer's record says in each step that all others are to be left out of it."""
    CONSPIRE = "conspire"
    """For a while a peer's record says that all peers of its stage that do not lie are to be left out."""
    STINGY = "stingy"
    """For a while a peer joins rounds, tells of what it gets, and sends no chunk."""
    TRICKLE = "trickle"
    """For a while a peer sends at a hundredth of the rate that it tells."""
    TEAR = "tear"
    """For a while each chunk that a peer sends breaks at its end."""
    RETICENT = "reticent"
    """For a while a peer does not say what came of rounds that have to be confirmed."""
    MISJUDGE = "misjudge"
    """For a while a peer closes each round that it may judge, and names a member that is at no fault."""
    FORK = "fork"
    """For a while a peer sends each member of a round another sum of the slice that it reduces."""
    FABRICATE = "fabricate"
    """For a while a peer makes averages up, of rounds with all members that never were, and goes on with them."""
    SIT = "sit"
    """For a while a peer makes averages up like that, and holds each until its stage has finished the step."""
    HOARD = "hoard"
    """The same, but the rounds name nobody else, and it answers nobody that asks for the average."""
    FORGE = "forge"
    """For a while the averages that a peer gives show other hashes of its mates' slices than those have signed."""
    MISNAME = "misname"
    """For a while a peer's record tells another average than it holds."""
    STRAY = "stray"
    """For a while a peer's record tells parameters of another history than it has, and it joins no round."""
    MISNORM = "misnorm"
    """For a while a peer's record tells other gradient norms than its averages have, and than it has applied."""
    MISTIE = "mistie"
    """For a while a peer tells other sums of a tied weight than it holds and has applied, and a better history of its copy, and gives
    made-up gradients and a made-up copy of the weight."""
    PRETEND = "pretend"
    """For a while a joiner's record says that it has the newest step of all on its disk, and it loads none."""
    MISGIVE = "misgive"
    """For a while the states that a peer gives to joiners are made up, under its true step and lineage."""
    INJECT = "inject"
    """For a while a peer sends peers of its own stage microbatches as if it served the stage before: made up, under the right names."""
    INFLATE = "inflate"
    """For a while a peer's part of each average is a thousand times as large as what it has computed."""
    FALSIFY = "falsify"
    """For a while the gradients that a peer adds are wrong."""
    DENOUNCE = "denounce"
    """For a while a peer says of each work that it computes again that it is wrong."""
    SHIELD = "shield"
    """For a while a peer says of each work that it computes again that it is right."""
    EQUIVOCATE = "equivocate"
    """For a while a peer says to one half of its mates that work is wrong, and to the other half that it is right."""
    CONCEAL = "conceal"
    """For a while the gradients that a peer adds are wrong, and it shows nobody what its part of an average is made of."""
    WITHHOLD = "withhold"
    """For a while a trainer launches nothing of what it owns."""
    DRIBBLE = "dribble"
    """For a while a trainer launches what it owns one by one, each in half of the time after which others would take it over."""
    GHOSTS = "ghosts"
    """For a while a peer tells of forty others that are not there, and renews their records."""


class Survivor(enum.Enum):
    """Which other peer of its stage must survive a fault that takes a peer away; else the fault is left out."""

    UP_TO_DATE = "awake, at the newest step of the stage"
    ANY = "alive, with the parameters of any step"


TAKES_AWAY = frozenset({Kind.KILL, Kind.RESTART, Kind.RESTART_BLANK, Kind.SLEEP, Kind.LEAVE, Kind.MIGRATE, Kind.BAN})
_LIES_OF_RECORDS = {
    Kind.BOAST,
    Kind.ACCUSE,
    Kind.CONTRADICT,
    Kind.LAG,
    Kind.WITHHOLD,
    Kind.GHOSTS,
    Kind.VOID,
    Kind.CONSPIRE,
    Kind.DRIBBLE,
    Kind.FLAP,
    Kind.BLINK,
    Kind.MUTE,
    Kind.PRETEND,
    Kind.INJECT,
}
_LIES_OF_ROUNDS = {Kind.SILENT, Kind.ABSORBED, Kind.FRAME, Kind.STINGY, Kind.TRICKLE, Kind.TEAR, Kind.MISJUDGE, Kind.RETICENT, Kind.INFLATE}
_LIES_OF_AVERAGES = {Kind.FORK, Kind.FABRICATE, Kind.SIT, Kind.HOARD, Kind.FORGE, Kind.MISNAME}
LIES_OF_NUMBERS = frozenset(_LIES_OF_AVERAGES | {Kind.STRAY, Kind.MISNORM, Kind.MISGIVE, Kind.MISTIE})
LIES_OF_WORK = frozenset({Kind.FALSIFY, Kind.DENOUNCE, Kind.SHIELD, Kind.EQUIVOCATE, Kind.CONCEAL})
LIES = frozenset(_LIES_OF_RECORDS | _LIES_OF_ROUNDS | LIES_OF_NUMBERS | LIES_OF_WORK)
HONEST = tuple(kind for kind in Kind if kind not in LIES and kind is not Kind.BAN)
"""What happens to peers by itself."""
OUTAGES = frozenset({Kind.BLACKOUT, Kind.STAGE_WIPED, Kind.STALE_MATES})


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: Kind
    target: float = 0.5
    """Which peer: a place in the sorted list of the present ones, from 0 to 1."""
    other: float = 0.5
    lasts_s: float = 1.0
    name: str = ""
    """The very peer, in a scripted run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run of the model, replayable: everything else is drawn from `seed`."""

    seed: int
    num_stages: int = 2
    peers_per_stage: int = 2
    num_microbatches: int = 6
    last_step: int = 6
    faults: tuple[Fault, ...] = ()
    survivor: Survivor = Survivor.UP_TO_DATE
    delay: float = -4.0
    """Logarithm of the median delay of a message in seconds."""
    riders: int = 5
    """Records that ride on a message."""
    takeover_s: float = 4.0
    copy_s: float = 0.0
    """How long it takes to copy the accumulator for a round."""
    rounding: bool = False
    """Averages of equal content from different rosters count as different parameters."""
    shares_norms: bool = False
    """An average is applied with the whole model's gradient norm of its step."""
    delayed: bool = False
    """Updates are delayed, and a step is computed while the one before is averaged."""
    ties_stages: bool = False
    """The first and the last stage hold copies of one weight."""
    download: float = 0.0
    """Logarithm of the median time of a download in seconds."""
    group_size: int = 0
    """Stages with more members average in two levels; 0: none does."""
    num_sections: int = 1
    """The sections of an average that is made in two levels."""
    local_batch: int = 0
    local_after: int = 0
    """Steps are local: peers update their own parameters after so many microbatches; 0: they do not."""
    certifies: bool = False
    """Averages count once more than half of the voters hold them."""
    audits: float = 0.0
    """The share of each peer's work that all its mates together compute again."""
    lost_receipts: float = 0.0
    """The share of parts of which the callers do not tell all receipts."""
    lost_bytes: float = 0.0
    """How often nobody gives the bytes of what a mate gave, where a result has another hash: of a lie, and on each second device."""
    off: frozenset[str] = frozenset()
    """Rules that are switched off, to show that the checks notice (`RULES_OFF`)."""
    limit_s: float = 300.0


def draw(
    seed: int,
    kinds: Sequence[Kind],
    *,
    survivor: Survivor = Survivor.UP_TO_DATE,
    off: frozenset[str] = frozenset(),
    delayed: bool = False,
    steps: tuple[int, int] = (4, 7),
    group_size: int = 0,
    certifies: bool = False,
) -> Scenario:
    """A run of random size with random faults of these kinds, from one to seven for each step or so. `steps`: fewest and most.

    With a `group_size` its stages have two to four times as many peers.
    """
    rng = random.Random(seed)
    num_stages = rng.choice((1, 2, 2, 3))
    last_step = rng.randint(*steps)
    count = rng.randint(1, 4) * last_step if kinds else 0
    faults = [
        Fault(rng.uniform(0.3, 3.0 * last_step), rng.choice(kinds), rng.random(), rng.random(), rng.choice((0.5, 2.0, 4.0, 9.0)))
        for _ in range(count)
    ]
    return Scenario(
        seed=seed,
        num_stages=num_stages,
        peers_per_stage=rng.choice((2, 3)) if not group_size else rng.randint(2 * group_size, 4 * group_size),
        num_microbatches=rng.randint(3, 8) * (2 if group_size else 1),
        last_step=last_step,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        survivor=survivor,
        delay=rng.choice((-5.0, -4.0, -3.0, -2.0)),
        riders=rng.choice((1, 2, 5)),
        takeover_s=rng.choice((0.5, 2.0, 4.0)),
        rounding=rng.random() < 0.5,
        shares_norms=seed % 2 == 1,
        delayed=delayed,
        ties_stages=seed // 2 % 2 == 1,
        copy_s=rng.choice((0.0, 0.0, 0.2, 0.6)) if Kind.CANCELLED in kinds else 0.0,
        download=rng.choice((0.0, 0.0, 2.5)),
        group_size=group_size,
        num_sections=1 + seed % 3 if group_size else 1,
        certifies=certifies,
        off=off,
        limit_s=max(300.0, 20.0 * last_step),
    )
