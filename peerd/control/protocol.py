"""What travels over the control socket: JSON lines over a Unix socket in the home's run folder (mode 0600).

The client sends one request line, `{"verb": "status", ...arguments}`. The daemon answers with any number of
`{"progress": "text"}` lines and then exactly one `{"ok": {...}}` or `{"error": {"exit_code", "message", "remedy"}}`.

verb      arguments                            what `ok` holds
status    -                                    StatusReply: this daemon
peers     -                                    PeersReply: the whole swarm as this daemon's table has it
history   since (int), events (bool), after    HistoryReply: steps and evaluations numbered `since` and later, events above `after`
contributions  -                               ContributionsReply: who computed what, by stage
wait      serving (bool) or step, timeout_s    {"schema", "step", "serving"}
leave     now (bool)                           {"schema"}; drains first unless `now`
pause     for_s (0: until resume), wait        {"schema", OwnerInfo's fields}; returns when what it held is handed on
resume    -                                    {"schema", OwnerInfo's fields}
limits    change (some of the limits)          {"schema", OwnerInfo's fields}
dashboard open (bool)                          {"schema", "address"}: with the token; `open` adds "open", which holds once, for a
                                               minute, and is no secret after that
export    folder (absolute path)               {"schema", "step", "folder", "files", "num_parameters"}; with progress lines
reach     -                                    {"schema", "port", "answers", "direct"}: per peer asked, its "peer", "observed" and
                                               "reached"; `direct` is DirectInfo with "answers" of its own
fault     kind, then for_s, factor, at or seed {"schema"}; only where Settings.allow_faults: this daemon does as daemon/faults.py says
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from peerd import SCHEMA as SCHEMA

MAX_LINE_BYTES = 4 * 1024 * 1024


class HealthItem(TypedDict):
    """Something the user should know; `severity` is info, warning or problem."""

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
    boundary_bytes: int  # one microbatch's activations between two stages


class PeerInfo(TypedDict):
    """One row of the table."""

    id: str
    stage: int
    step: int
    phase: str  # joining, accumulating, averaging, averaged
    leaving: bool
    suspect: bool
    queue: int
    in_flight: int
    done: int  # microbatches of this step in its accumulator
    next_done: int  # and of the next step, where updates are delayed: computed while this one is averaged
    throughput: float  # samples per second, moving average
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
    relays: bool  # relays for those that nobody can dial
    age_s: float  # since its record last rose
    path: NotRequired[str]  # how this daemon sends it tensors: local, direct, tunnel or relay; not told of itself


class EvaluationInfo(TypedDict):
    """The mean loss on the evaluation tokens with the parameters that `step` updates lie behind."""

    step: int
    loss: float


class Counters(TypedDict):
    """Totals of this daemon since it started."""

    accumulated_microbatches: int
    duplicate_microbatches: int  # counted twice in an applied average: must stay 0
    lost_microbatches: int  # missing from an applied average: must stay 0
    replayed_microbatches: int  # launched again after a first try
    suppressed_microbatches: int  # recognised as already held and not added again
    inexact_steps: int
    ledger_resets: int
    reloads: int
    rounds_failed: int
    faults_seen: int  # peers this daemon came to suspect
    boundary_crossings: int  # activations or gradients this daemon sent over a stage boundary
    boundary_bytes: int  # RPC payload of those
    bytes_sent: int
    bytes_received: int
    messages_refused: int


class OwnerInfo(TypedDict):
    """What this machine's owner allows, and what came of it."""

    limits: dict[str, Any]  # as peerd/policy/owner/governor.py names them
    today: int  # bytes moved since midnight
    this_month: int
    paused: str  # the reason; empty: it works
    until: str  # when it goes on
    resting: bool  # it has left its stage


class DirectInfo(TypedDict):
    """Direct connections of this daemon."""

    port: int  # 0: it takes none now
    peers: int  # to which it has one
    local: NotRequired[int]  # over a local socket; absent where the daemon is older
    why: str  # it has none; empty where it may


class UpdateInfo(TypedDict):
    """How the parameters are updated just now."""

    learning_rate: float  # of the step under way
    gradient_norm: float | None  # the whole model's at the last finished step; None: not shared in this run, or it overflowed
    max_gradient_norm: float  # 0: no clipping
    loss_scale: float | None  # of float16


class ReachInfo(TypedDict):
    """How others reach this machine."""

    state: str  # as in PeerInfo
    reason: str
    relays: list[str]  # peers at which it holds reservations


class RelayInfo(TypedDict):
    """What this daemon relays for others."""

    volunteers: bool  # was started with --relay
    off: str  # why it does not relay now; empty: it does
    reservations: int
    circuits: int
    bytes: int  # since the stage was entered


class LinkInfo(TypedDict):
    """What tensors travel as over one link, where the run leaves that to each link."""

    peer: str
    tensor: str  # activations: to that peer; activation_gradients: from it
    codec: str
    rate: float | None  # bytes per second as measured; None: not yet
    load: float | None  # share of the time that the link is busy while nobody waits for it
    reason: str


class StatusReply(TypedDict):
    schema: int
    join: str  # the address others paste, with #RUN-ID
    pid: int
    uptime_s: float
    tasks: int  # of the event loop, those that wait included
    run: RunInfo
    peer: PeerInfo
    counters: Counters
    decision: str  # the last decision of the step rules, with its reason
    rebalancing: str  # the last plan's reason
    moves: int  # times this daemon changed its stage
    health: list[HealthItem]
    data: str  # whether the run's data is here, in words
    evaluation: EvaluationInfo | None  # the newest one known
    compute_stand_in_ms: float
    slow_factor: float
    dashboard: str  # its address, without the token; empty where it is off
    owner: OwnerInfo
    direct: NotRequired[DirectInfo]
    reach: NotRequired[ReachInfo]
    relay: NotRequired[RelayInfo]
    update: NotRequired[UpdateInfo]
    links: NotRequired[list[LinkInfo]]  # empty where the manifest names the codecs


class StageInfo(TypedDict):
    stage: int
    num_peers: NotRequired[int]  # more than `peers` has where the swarm is so large that nobody knows all of it
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
    evaluation: EvaluationInfo | None  # the newest one known
    tokens_per_second: float
    stages: list[StageInfo]


class StepInfo(TypedDict):
    step: int
    loss: float
    tokens: int
    time_s: float  # wall clock of the commit, seconds since the epoch
    learning_rate: NotRequired[float]
    gradient_norm: NotRequired[float | None]  # the whole model's before clipping; None: not known here
    overflowed: NotRequired[bool]  # a float16 gradient overflowed, so the step changed nothing


class EventInfo(TypedDict):
    number: int
    time_s: float
    kind: str  # started, joined, suspect, back, leaving, left, gone, moved, rebalancing, resumed, raised, cleared
    peer: str  # empty: this daemon
    stage: int | None
    text: str


class HistoryReply(TypedDict):
    schema: int
    steps: list[StepInfo]  # those whose loss is known here
    evaluations: list[EvaluationInfo]  # those made since this home's daemon was there
    events: list[EventInfo]  # empty unless asked for


class ContributionInfo(TypedDict):
    peer: str
    steps: int  # averages it took part in
    microbatches: int
    tokens: int
    reporter: str  # whose count this is; the peer itself only where nobody else has one


class StageContributionsInfo(TypedDict):
    stage: int
    first_step: int
    last_step: int
    steps: int  # so many of those were counted
    peers: list[ContributionInfo]


class ContributionsReply(TypedDict):
    schema: int
    me: str
    run: str
    num_stages: int
    stages: list[StageContributionsInfo]  # those that somebody could tell of


class PeerTraceInfo(TypedDict):
    peer: str
    stage: int
    complete: bool  # false: it had forgotten the earliest, or had more than it could tell
    offset_ms: float  # added to its clock
    offset_error_ms: float  # which is off by no more than this
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
    silent: list[SilentPeerInfo]  # asked in vain
    not_asked: int  # of a large swarm
    others: list[str]  # the peers that spans name, by their place in this list; empty: nobody


Reply = dict[str, Any]
