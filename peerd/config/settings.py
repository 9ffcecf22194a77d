"""What one volunteer's daemon may do: the client resolves flag, environment and default once and hands this over."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a daemon is started with. Travels as one JSON argument to `python -m peerd.daemon`."""

    home: str
    """Folder of identity, state and control socket."""
    run_file: str = ""
    """Path of a run.toml to start as its organiser; empty when joining."""
    join: str = ""
    """Addresses to join at, tried in turn: `multiaddr/p2p/PEER[#RUN-ID]`, with spaces between them; empty when starting.
    Both empty: the run this home was last in."""
    host: str = ""
    """IPv4 address to listen on; 0.0.0.0 for all. Empty: loopback when starting or joining there, else all."""
    port: int = 0
    """TCP port to listen on; 0 lets the system choose."""
    port_mapping: bool = True
    """Ask the router to forward the port, where the daemon listens beyond loopback."""
    direct: bool = True
    """Take and make direct connections by TLS, where no cap on upload or download is set."""
    local: bool = True
    """Make them over a local socket to daemons of the same user on this machine."""
    direct_port: int = 0
    """TCP port to take them at; 0 lets the system choose."""
    relay: bool = False
    """Volunteer as a relay for peers that nobody can dial."""
    relay_rate: float = 0.0
    """Bytes per second relayed at most, both directions of all together; 0: no limit."""
    relay_daily: int = 0
    """Bytes relayed per day at most; 0: no limit."""
    stage: int = -1
    """Stage to serve; -1 takes the one that needs help most."""
    stay: bool = False
    """Never move from the first stage served."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    data: str = ""
    """Text file, folder or address to train on where the run's data is the organiser's own, and must match the run's hash; or `swarm`:
    fetch it from a peer."""
    compute_stand_in_ms: float = 0.0
    """Sleep this long per microbatch and peer in place of real work (benchmarks only); 0 is off."""
    slow_factor: float = 1.0
    """Take this many times as long per microbatch (tests and benchmarks); 1 is off."""
    dashboard: bool = True
    """Serve the dashboard and /metrics."""
    dashboard_host: str = "127.0.0.1"
    """IP address the dashboard listens on."""
    dashboard_port: int = 0
    """0: the port of last time where it is free, else any."""
    dashboard_public: bool = False
    """Anybody may look, nobody may act."""
    observe: bool = True
    """Keep a history of the run in the home, and the last timelines in memory."""
    otel: bool = False
    """Export OpenTelemetry traces of a sample of microbatches, as the OTEL_* environment says."""
    tensorboard: str = ""
    """Folder to write TensorBoard scalars into; empty: none."""
    wandb: str = ""
    """Project at Weights & Biases to log scalars to; empty: none."""
    allow_faults: bool = False
    """Accept the control verb `fault` (tests and the demo's chaos only): anyone with the control socket may then harm this daemon."""
    join_told: bool = False
    """The addresses to join at come as a line on standard input: a demo's daemons start before there is one."""
    follow_parent: bool = False
    """Leave when standard input closes, so that a demo's daemons never outlive it."""
    ephemeral: bool = False
    """Remove the home folder when the daemon ends, however it ends."""

    def told(self, line: str) -> Settings:
        """The same with the addresses to join at, once they are there."""
        return replace(self, join_told=False, join=line.strip())

    def __post_init__(self) -> None:
        if bool(self.run_file) + bool(self.join) + self.join_told > 1:
            raise ValueError("settings need at most one of run_file, join and join_told")
        for name, port in (("port", self.port), ("direct_port", self.direct_port), ("dashboard_port", self.dashboard_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} is {port}; it must be between 0 and 65535")
        if self.relay_rate < 0 or self.relay_daily < 0:
            raise ValueError("relay_rate and relay_daily must not be negative")
        if self.compute_stand_in_ms < 0:
            raise ValueError("compute_stand_in_ms must not be negative")
        if self.slow_factor < 1:
            raise ValueError("slow_factor must be at least 1")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))
