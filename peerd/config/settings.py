"""The settings of one daemon. The client resolves flags, environment and defaults once and passes the result to the daemon."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, replace

from peerd.peer_names import check_name

MAX_SAMPLE_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that a daemon starts with, passed as one JSON argument to `python -m peerd.daemon`."""

    home: str
    """Folder of identity, state and control socket."""
    owner_home: str = ""
    """Folder of the owner's limits, if daemons of several devices share them; empty: home."""
    sharers: int = 1
    """Number of daemons among which limits of the whole machine are divided."""
    run_file: str = ""
    """Path of a run.toml to start as its organiser; empty when joining."""
    join: str = ""
    """Addresses to join at, tried in turn: `multiaddr/p2p/PEER[#RUN-ID]`, separated by spaces; empty when starting a run.
    If run_file is empty, too, the daemon rejoins the last run of this home."""
    invitation: str = ""
    """Invitations to the run, as text; one of them may be for this peer. Empty: that which the home remembers, if any."""
    organiser: str = ""
    """Folder of the organiser's key, for the daemons of the organiser's further devices; empty: beside run_file, if that is given."""
    host: str = ""
    """IPv4 address to listen on; 0.0.0.0 for all. Empty: loopback when starting a run or joining at loopback, else all."""
    port: int = 0
    """TCP port to listen on; 0 lets the system choose."""
    port_mapping: bool = True
    """Ask the router to forward the port, unless the daemon listens on loopback only."""
    direct: bool = True
    """Use direct TLS connections, unless a cap on upload or download is set."""
    local: bool = True
    """Use local sockets to daemons of the same user on this machine."""
    direct_port: int = 0
    """TCP port that accepts direct connections; 0 lets the system choose."""
    quic: bool = True
    """Connect to peers behind routers by QUIC, through both routers, where the package for it is installed. Needs `direct`, and
    `port_mapping`: the package also asks the router for a port."""
    quic_port: int = 0
    """UDP port for that; 0 lets the system choose."""
    relay: bool = False
    """Volunteer as a relay for peers that cannot be dialled."""
    relay_rate: float = 0.0
    """Limit of relayed bytes per second, both directions of all circuits together; 0: no limit."""
    relay_daily: int = 0
    """Limit of relayed bytes per day; 0: no limit."""
    stage: int = -1
    """Stage to serve; -1: the one that needs help most."""
    keeps_stage: bool = False
    """Never move from the first stage served."""
    stays_s: float = 0.0
    """How long its owner means to let it run, s from its start; 0: not said."""
    nickname: str | None = None
    """What others see beside this peer's id; empty: nothing; None: what this home was told last."""
    team: str | None = None
    """The name of a team, shown beside it."""
    unlisted: bool | None = None
    """Be named in no table of who computed how much; None: what this home was told last."""
    nice: int = 0
    """The process raises its niceness to this, 0 to 19, so that other programs go first; 0: as it was started."""
    spares_laptop: bool = False
    """On a machine with a battery pause on battery, and while it is used, until its owner has set limits."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    data: str = ""
    """Text file, folder or address to train on if the run's data is the organiser's own; it must match the run's hash. Or `swarm`: fetch
    it from a peer."""
    compute_stand_in_ms: float = 0.0
    """Sleep this long per microbatch instead of computing (benchmarks only); 0: off."""
    slow_factor: float = 1.0
    """Factor by which each microbatch takes longer (tests and benchmarks); 1: off."""
    dashboard: bool = True
    """Serve the dashboard and /metrics."""
    dashboard_host: str = "127.0.0.1"
    """IP address the dashboard listens on."""
    dashboard_port: int = 0
    """Port of the dashboard; 0: the last port if it is free, else any."""
    dashboard_public: bool = False
    """Serve the dashboard to everybody, read-only."""
    sample: str = ""
    """Text from which the model goes on after each evaluation, for the dashboard; empty: none."""
    observe: bool = True
    """Keep a history of the run in the home, and the last timelines in memory."""
    otel: bool = False
    """Export OpenTelemetry traces of a sample of microbatches, configured by the OTEL_* environment variables."""
    tensorboard: str = ""
    """Folder for TensorBoard scalars; empty: none."""
    moves: str = ""
    """Folder for what this daemon does to its own parameters, where steps are local (`peerd reference --replay`); empty: none."""
    wandb: str = ""
    """Project at Weights & Biases for scalars; empty: none."""
    allow_faults: bool = False
    """Accept the control verb `fault` (tests and the demo's chaos only). It lets any user of the control socket harm this daemon."""
    join_told: bool = False
    """Read the addresses to join from standard input, because a demo's daemons start before the first one has an address."""
    follow_parent: bool = False
    """Leave when standard input closes, so that a demo's daemons end with it."""
    ephemeral: bool = False
    """Remove the home folder when the daemon ends, whatever the cause."""

    def told(self, line: str) -> Settings:
        """The same settings with the addresses to join, read from standard input."""
        return replace(self, join_told=False, join=line.strip())

    def __post_init__(self) -> None:
        if bool(self.run_file) + bool(self.join) + self.join_told > 1:
            raise ValueError("settings need at most one of run_file, join and join_told")
        for name in ("port", "direct_port", "quic_port", "dashboard_port"):
            port = getattr(self, name)
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} is {port}; it must be between 0 and 65535")
        if self.relay_rate < 0 or self.relay_daily < 0:
            raise ValueError("relay_rate and relay_daily must not be negative")
        if not 0 <= self.stays_s < math.inf:
            raise ValueError("stays_s must be finite and not negative")
        for name in ("nickname", "team"):
            try:
                check_name(getattr(self, name) or "")
            except ValueError as error:
                raise ValueError(f"{name} {getattr(self, name)!a}: {error}") from None
        if len(self.sample) > MAX_SAMPLE_CHARS:
            raise ValueError(f"sample has {len(self.sample)} characters; the limit is {MAX_SAMPLE_CHARS}")
        if not 0 <= self.nice <= 19:
            raise ValueError("nice must be between 0 and 19")
        if self.sharers < 1:
            raise ValueError("sharers must be at least 1")
        if self.compute_stand_in_ms < 0:
            raise ValueError("compute_stand_in_ms must not be negative")
        if self.slow_factor < 1:
            raise ValueError("slow_factor must be at least 1")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))
