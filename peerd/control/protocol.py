"""The control protocol: JSON lines over a Unix socket in the home's run folder (mode 0600).

The client sends one request line, `{"verb": "status", ...arguments}`. The daemon answers with any number of
`{"progress": "text"}` lines and then exactly one `{"ok": {...}}` or `{"error": {"exit_code", "message", "remedy"}}`.

verb      arguments                            content of `ok`
status    -                                    StatusReply: this daemon
peers     -                                    PeersReply: the whole swarm as this daemon's table shows it
history   since (int), events (bool), after    HistoryReply: steps and evaluations numbered `since` and later, events above `after`
contributions  -                               ContributionsReply: the work of each peer, by stage
receipt   last_s (0: all)                      {"schema", "receipt" (base64)}: this peer's own work, signed
accounts  -                                    {"schema", "run", "accounts"}: "stage", "step" and "id" of each that this daemon keeps
wait      serving (bool) or step, timeout_s    {"schema", "step", "serving"}
leave     now (bool)                           {"schema"}; the daemon drains first unless `now`, with progress lines
pause     for_s (0: until resume), wait        {"schema", OwnerInfo's fields}, once held work is handed on; progress lines until then
resume    -                                    {"schema", OwnerInfo's fields}
limits    change (some of the limits)          {"schema", OwnerInfo's fields}
dashboard open (bool)                          {"schema", "address"}: the address with the token; `open` adds "open", an address that
                                               works once and for one minute
export    folder (absolute path), format       {"schema", "step", "folder", "files", "num_parameters", "unproven"}; with progress lines
          ("peerd"), timeout_s (no limit)
access    list (hex of a signed one) or none   {"schema", "peer", "run", "organiser" (folder of its key), "list", AccessInfo's fields}
audit     -                                    AuditReply (audits.py): who was audited, by whom, and what came of it
ask       prompt, tokens or messages,          TextReply (texts.py), with a line of progress for each token
          max_tokens, temperature, top_p,
          seed, stops
reach     -                                    {"schema", "port", "answers", "direct"}: an answer has "peer", "observed" and "reached"
                                               for each peer asked; `direct` is DirectInfo with its own "answers"
fault     kind, then for_s, factor, by_s, at,  {"schema"}; only with Settings.allow_faults, else an error: the daemon misbehaves as
          peer, seed                           faults.py defines
lie       module, and what that takes          {"schema"}; only with Settings.allow_faults, else an error: the daemon also runs that code,
                                               as liars.py defines
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from peerd import SCHEMA as SCHEMA
from peerd.control.audits import AuditsInfo
from peerd.control.contributions import AccountInfo as AccountInfo
from peerd.control.contributions import ContributionInfo as ContributionInfo
from peerd.control.contributions import ContributionsReply as ContributionsReply
from peerd.control.contributions import StageContributionsInfo as StageContributionsInfo
from peerd.control.reach import ReachInfo as ReachInfo
from peerd.control.reach import RelayInfo as RelayInfo
from peerd.control.texts import TextsInfo

MAX_LINE_BYTES = 4 * 1024 * 1024


class HealthItem(TypedDict):
    """A condition that the user should know; `severity` is info, warning or problem."""

    code: str
    title: str
    severity: str
    remedy: str


class RunInfo(TypedDict):
    id: str
    name: str
    num_stages: int
    microbatches_per_step: int
    steps: int  # 0: no end
    tokens_per_step: int  # at full sequence length
    boundary_bytes: int  # size of one microbatch's activations between two stages
    group_size: NotRequired[int]  # peers of a stage that average in one round; 0: all; absent from older daemons
    local_batch: NotRequired[int]  # microbatches behind each of a peer's own updates within a step; 0: steps are not local
    local_steps_after: NotRequired[int]  # the first step that is local
    about: NotRequired[dict[str, str]]  # [about] of the manifest, without empty texts


class PathInfo(TypedDict, total=False):
    """How this daemon sends tensors to another peer; empty for the daemon itself."""

    path: str  # local, direct, quic, tunnel or relay
    connections: int  # TCP connections to it; absent unless the path is direct
    resent: float | None  # share of the TCP segments to it that were sent again, of the last hundred or more; None: not known


class PeerInfo(PathInfo):
    """One row of the table: fields of the record by their names, and some derived from it."""

    id: str
    stage: int
    step: int
    phase: str  # joining, accumulating, averaging, averaged; sidelined: left out by its mates, so its work counts for nothing;
    # unaveraged: its gradients have been in no average for five steps or more
    leaving: bool
    paused: NotRequired[bool]  # it leaves, or has left, because it is paused; absent from older daemons
    suspect: bool
    queue: int
    in_flight: int
    done: int  # microbatches of this step in its accumulator
    next_done: int  # microbatches of the next step; with delayed updates they are computed while this step is averaged
    throughput: float  # samples per second: what it computes, or less where its line is known to carry less
    computes: NotRequired[float]  # what it would do on any line; 0: its line is not known well enough
    backlog: NotRequired[float]  # microbatches that waited for its processor or uplink, mean over the last rebalancing period
    drift: NotRequired[float]  # share by which its parameters were off the stage's mean when last averaged; 0: never, or equal
    nickname: NotRequired[str]  # what its owner calls it; anybody may take any name; empty: not said
    team: NotRequired[str]
    stays_hours: NotRequired[int]  # how long its owner still means to let it run; 0: not said
    tokens: int  # contributed so far
    last_loss: float | None
    device: str
    memory_bytes: int
    software: str
    incarnation: int
    inexact: int
    trains: bool  # has the run's data and launches microbatches
    addresses: list[str]
    reach: str  # how others reach it: unknown, direct, relayed, client (not at all)
    relays: bool  # it relays for peers that cannot be dialled
    unaveraged: int  # steps in a row in which it had work and its gradients were in no average
    up: int  # bytes per second of its uplink, measured by itself while tensors passed; 0: unknown
    down: int  # the same of its downlink
    coordinate: NotRequired[list[float] | None]  # x, y and height in seconds of round trip, and the share that they are off; None: unknown
    age_s: float  # since its last new record
    still_s: NotRequired[float]  # since its step, phase or ledger last changed, as this daemon has seen it; 0 for a visitor
    microbatch_s: NotRequired[float]  # computing time of a microbatch; 0: not known yet
    round_trip_s: NotRequired[float | None]  # from this daemon, as measured or else by both coordinates; None: not known; absent for itself


class EvaluationInfo(TypedDict):
    """Mean loss on the evaluation tokens with the parameters after `step` updates."""

    step: int
    loss: float


class Counters(TypedDict):
    """Totals of this daemon since it started."""

    accumulated_microbatches: int
    duplicate_microbatches: int  # counted twice in an applied average: must stay 0
    lost_microbatches: int  # missing from an applied average: must stay 0
    microbatch_calls: int  # to the next stages, also of the same microbatch again
    replayed_microbatches: int  # launched again after a failed attempt
    suppressed_microbatches: int  # already in the accumulator and not added again
    inexact_steps: int
    ledger_resets: int
    reloads: int
    rounds_failed: int
    group_sums: int  # sums of groups that this daemon has made with others of its stage
    own_updates: int  # of its own parameters, within steps, where steps are local
    average_sections: int  # sections of averages that it has made with holders of other sums
    faults_seen: int  # times this daemon suspected a peer
    boundary_crossings: int  # activations or gradients this daemon sent over a stage boundary
    boundary_bytes: int  # RPC payload of these
    bytes_sent: int
    bytes_received: int
    messages_refused: int
    calls_put_off: int  # of callers that had too many open; they hear when to come back
    internal_errors: int  # bugs that showed in this daemon, each in its log with a traceback


class BannedInfo(TypedDict):
    peer: str
    reason: str  # empty: none was given


class AccessInfo(TypedDict):
    """The peers that may take part in the run, as this daemon knows them."""

    by_invitation: bool
    number: int  # of the organiser's list; 0: there is none
    allowed: int  # peers on it that need no invitation
    banned: list[BannedInfo]
    invited_until: int | None  # end of this peer's own invitation, seconds since the epoch; 0: it has no end; None: it has no invitation
    refused: int  # calls of peers that may not take part


class OwnerInfo(TypedDict):
    """The owner's limits, the data used, and the current pause."""

    limits: dict[str, Any]  # the fields of Limits in peerd/policy/owner/governor.py
    today: int  # bytes sent and received since midnight
    this_month: int
    paused: str  # reason of the pause; empty: the daemon works
    until: str  # end of the pause, in words
    resting: bool  # the daemon has left its stage
    nice: NotRequired[int]  # niceness of the daemon's process; absent where none runs, and from older daemons


class DirectInfo(TypedDict):
    """Direct connections of this daemon."""

    port: int  # port that accepts them; 0: it accepts none now
    peers: int  # number of peers connected directly
    local: NotRequired[int]  # of these over a local socket; absent from older daemons
    quic: NotRequired[int]  # of these through the routers of both ends; absent from older daemons
    quic_why: NotRequired[str]  # reason for making none through routers; empty where they are made
    seen_at: NotRequired[str]  # address and UDP port at which others see this machine's packets; empty while unknown
    why: str  # reason for having none; empty where they are allowed


class ComputingInfo(TypedDict):
    """The microbatch that this daemon computes now."""

    step: int
    index: int
    for_s: float  # computing time so far
    usual_s: float  # of a microbatch; 0: not known yet


class MemoryInfo(TypedDict):
    """Bytes of the device's memory; of the machine's, where the processor computes."""

    total: int
    used: int  # by all processes
    held: int  # by this daemon; 0 where the processor computes
    shortage: str  # what was done where it did not suffice, in words; empty: it has sufficed
    slots: int  # microbatches held at once
    offloads: NotRequired[bool]  # the machine's memory holds the optimizer's state, and parameters that are set aside


class JoinInfo(TypedDict):
    """How far this daemon is on its way into its stage, while it does not serve yet."""

    bytes: int  # of the state that it downloads; 0: not known yet
    bytes_left: int
    steps_behind: int  # what it has, or downloads, is so many steps older than its stage
    ready_s: float | None  # until it serves; None: not known
    can_catch_up: bool  # False: averages reach it more slowly than its stage makes them
    plan: str  # the same in words; empty: nothing is known yet


class UpdateInfo(TypedDict):
    """Quantities of the parameter update."""

    learning_rate: float  # of the current step
    gradient_norm: float | None  # of the whole model at the last finished step; None: not shared in this run, or it overflowed
    max_gradient_norm: float  # 0: no clipping
    loss_scale: float | None  # of float16
    local_batch: NotRequired[int]  # microbatches behind each of its own updates within a step; 0: steps are not local
    optimizer: NotRequired[str]  # as train.optimizer; absent from older daemons
    optimizer_bits: NotRequired[int]  # of each number of the optimizer's state; absent from older daemons
    drift: NotRequired[float | None]  # share by which this peer's parameters were off the mates' mean when last averaged; None: never


class LinkInfo(TypedDict):
    """The codec of one link, in a run where each link chooses its own."""

    peer: str
    tensor: str  # activations: to that peer; activation_gradients: from it
    codec: str
    rate: float | None  # measured bytes per second; None: not measured yet
    load: float | None  # share of the time in which the sender's line is busy with such tensors, this link's and others'
    reason: str


class LineInfo(PathInfo):
    """What this daemon knows of the line of another peer, in bytes per second; None: unknown."""

    peer: str
    sends: float | None  # rate at which tensors arrive there, as that peer tells
    receives: float | None  # rate at which its tensors arrive here, as measured
    up: float | None  # of its whole uplink: as its record says, and no more than was measured
    down: float | None


class StatusReply(TypedDict):
    schema: int
    join: str  # address for `peerd join`, with #RUN-ID
    pid: int
    uptime_s: float
    tasks: int  # asyncio tasks, waiting ones included
    run: RunInfo
    peer: PeerInfo
    counters: Counters
    computing: NotRequired[ComputingInfo | None]  # None: no pass runs now
    memory: NotRequired[MemoryInfo]
    decision: str  # last decision of the step rules, with its reason
    joining: NotRequired[JoinInfo | None]  # None: it serves
    rebalancing: str  # reason of the last rebalancing plan
    moves: int  # number of times this daemon changed its stage
    health: list[HealthItem]
    data: str  # state of the run's data on this machine, in words
    evaluation: EvaluationInfo | None  # the newest known
    compute_stand_in_ms: float
    slow_factor: float
    dashboard: str  # address without the token; empty: off
    owner: OwnerInfo
    direct: NotRequired[DirectInfo]
    reach: NotRequired[ReachInfo]
    relay: NotRequired[RelayInfo]
    update: NotRequired[UpdateInfo]
    access: NotRequired[AccessInfo]
    audits: NotRequired[AuditsInfo | None]  # None: peers of the run do not audit each other
    texts: NotRequired[TextsInfo]  # absent from older daemons
    links: NotRequired[list[LinkInfo]]  # empty where the manifest names the codecs
    lines: NotRequired[list[LineInfo]]  # of live peers of which something is known


class StageInfo(TypedDict):
    stage: int
    num_peers: NotRequired[int]  # estimate; exceeds the length of `peers` in swarms too large for full tables
    step: int
    missing: int  # microbatches of the work step that no live peer of the stage holds
    queue: int
    throughput: float
    peers: list[PeerInfo]


class PeersReply(TypedDict):
    schema: int
    run: RunInfo
    work_step: int | None
    last_loss: float | None
    evaluation: EvaluationInfo | None  # the newest known
    tokens_per_second: float
    stages: list[StageInfo]
    access: NotRequired[AccessInfo]
    audits: NotRequired[AuditsInfo | None]  # None: peers of the run do not audit each other
    outdated: NotRequired[bool]  # the daemon rests and hears nothing, so the table is what it knew; absent from older daemons


class StepInfo(TypedDict):
    step: int
    loss: float
    tokens: int
    time_s: float  # wall clock of the commit, seconds since the epoch
    learning_rate: NotRequired[float]
    gradient_norm: NotRequired[float | None]  # of the whole model before clipping; None: unknown to this daemon
    overflowed: NotRequired[bool]  # a float16 gradient overflowed, so the step changed no parameters


class EventInfo(TypedDict):
    number: int
    time_s: float
    kind: str  # started, joined, suspect, back, leaving, paused, left, gone, banned, lifted, moved, unaveraged, averaged, rebalancing,
    # resumed, raised, cleared
    peer: str  # empty: this daemon
    stage: int | None
    text: str


class HistoryReply(TypedDict):
    schema: int
    steps: list[StepInfo]  # steps whose loss this daemon knows
    evaluations: list[EvaluationInfo]  # made since a daemon of this home joined the run
    events: list[EventInfo]  # empty unless requested
    names: NotRequired[dict[str, str]]  # what present peers of these events call themselves, by id


class PeerTraceInfo(TypedDict):
    peer: str
    stage: int
    complete: bool  # false: its earliest spans are missing
    offset_ms: float  # added to its clock readings
    offset_error_ms: float  # largest possible error of that offset
    spans: list[list[int]]  # kind (timeline/spans.py), begin and length in us, step, microbatch or -1, other end, bytes


class SilentPeerInfo(TypedDict):
    peer: str
    stage: int
    reason: str


class TraceReply(TypedDict):
    schema: int
    run: str
    first_step: int
    last_step: int
    peers: list[PeerTraceInfo]  # the asking daemon first
    silent: list[SilentPeerInfo]  # peers that did not answer
    not_asked: int  # number of peers left out in a large swarm
    others: list[str]  # peers that spans refer to by index; "": none


Reply = dict[str, Any]
