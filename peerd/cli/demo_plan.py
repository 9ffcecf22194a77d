"""The plan of a demo, from its flags: the run, the stage of each peer, slow peers, kills and chaos."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerd.cli.demo_chaos import Chaos, parse_chaos
from peerd.errors import ManifestError, UsageError

if TYPE_CHECKING:
    from peerd.config.manifest import Manifest

DEFAULT_STAGES = 2
DEFAULT_STEPS = 30
MAX_PEERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A daemon to end with SIGKILL once the swarm has reached a step."""

    peer: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    manifest: Manifest
    num_peers: int
    slow: Mapping[int, float]
    kills: tuple[Kill, ...]
    chaos: Chaos | None
    stand_in_ms: float
    observed: bool = True
    """The daemons keep a history, and the first has a dashboard."""
    moves: str = ""
    """Folder for what the daemons do in local steps; empty: none."""

    @property
    def num_stages(self) -> int:
        return self.manifest.train.num_stages

    @property
    def steps(self) -> int:
        return self.manifest.train.steps

    @property
    def has_checkpoints(self) -> bool:
        return bool(self.manifest.swarm.checkpoint_every_steps)

    def stage_of(self, peer: int) -> int:
        """Peers take the stages in turn."""
        return peer % self.num_stages

    @property
    def data_of_joiners(self) -> str:
        """The data source of joining daemons. They read the organiser's text, because all are on one machine."""
        source = self.manifest.data.source
        return "" if source == "stdlib" else source


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFlags:
    """The demo's flags as given; None if the run file or a default decides."""

    stages: int | None
    peers: int | None
    steps: int | None
    run_file: Path | None
    seed: int | None
    accumulate: str | None
    slow: tuple[str, ...]
    kill: tuple[str, ...]
    chaos: str | None
    stand_in_ms: float


def plan_of(flags: DemoFlags) -> DemoPlan:
    """The plan for these flags. Raises UsageError or ManifestError if they are invalid."""
    manifest = _manifest_of(flags)
    num_stages = manifest.train.num_stages
    num_peers = flags.peers if flags.peers is not None else max(4, num_stages)
    if num_peers < num_stages:
        raise UsageError(f"{num_peers} peers cannot serve {num_stages} stages", f"--peers must be at least {num_stages}")
    kills = tuple(Kill(peer=peer, step=int(step)) for peer, step in (_pair("--kill", text, "@", num_peers) for text in flags.kill))
    for kill in kills:
        if not 0 <= kill.step < manifest.train.steps:
            raise UsageError(f"--kill {kill.peer}@{kill.step}: the demo runs steps 0 to {manifest.train.steps - 1}")
    slow: dict[int, float] = {}
    for text in flags.slow:
        peer, factor = _pair("--slow", text, "=", num_peers)
        if not 1 <= factor <= 1000:
            raise UsageError(f"--slow {text}: the factor must be between 1 and 1000")
        if peer in slow:
            raise UsageError(f"--slow {text}: peer {peer} has a factor already")
        slow[peer] = factor
    chaos = parse_chaos(flags.chaos) if flags.chaos is not None else None
    plan = DemoPlan(manifest=manifest, num_peers=num_peers, slow=slow, kills=kills, chaos=chaos, stand_in_ms=flags.stand_in_ms)
    if chaos is not None and not chaos.kinds(plan.has_checkpoints):
        raise UsageError(f"--chaos {flags.chaos}: this run keeps no checkpoints", "set swarm.checkpoint_every_steps in its run.toml")
    return plan


def _pair(flag: str, text: str, separator: str, num_peers: int) -> tuple[int, float]:
    """Parse `PEER=FACTOR` or `PEER@STEP`, and check that the demo has that peer."""
    left, found, right = text.partition(separator)
    try:
        peer, value = int(left), (float(right) if separator == "=" else int(right))
    except ValueError:
        peer, value, found = 0, 0.0, ""
    if not found:
        shape = "PEER=FACTOR" if separator == "=" else "PEER@STEP"
        raise UsageError(f"{flag} {text}: not {shape}", f"for example {flag} 1{separator}3")
    if not 0 <= peer < num_peers:
        raise UsageError(f"{flag} {text}: peer {peer} does not exist", f"the demo has peers 0 to {num_peers - 1}")
    return peer, value


def _manifest_of(flags: DemoFlags) -> Manifest:
    base = _from_file(flags.run_file) if flags.run_file is not None else _built_in(flags.stages or DEFAULT_STAGES)
    changes: dict[str, Any] = {"steps": flags.steps or base.train.steps or DEFAULT_STEPS}
    if flags.stages is not None:
        changes["num_stages"] = flags.stages
    if flags.accumulate is not None:
        changes["accumulate"] = flags.accumulate
    try:
        return dataclasses.replace(
            base,
            seed=base.seed if flags.seed is None else flags.seed,
            train=dataclasses.replace(base.train, **changes),
            # Several daemons share this machine, and only a fixed number of threads makes their gradients equal to the bit.
            compute=dataclasses.replace(base.compute, threads=base.compute.threads or 1),
        )
    except ValueError as error:
        raise UsageError(str(error), "correct the demo's flags") from None


def _built_in(num_stages: int) -> Manifest:
    """A run that is small enough for a laptop to reduce the loss in half a minute."""
    from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig

    return Manifest(
        name="demo",
        model=ModelConfig(num_layers=max(4, num_stages), d_model=128, num_heads=4, d_ff=512),
        train=TrainConfig(num_stages=num_stages, microbatches_per_step=16, microbatch_size=4, sequence_length=128, learning_rate=3e-3),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=1.0),
    )


def _from_file(path: Path) -> Manifest:
    """The user's run, open to the demo's own daemons. Relative paths start at the run file's folder."""
    from peerd.config import manifest
    from peerd.config.data_config import REMOTE

    if path.is_dir():
        path = path / "run.toml"
    run = manifest.load(path)
    if run.start.state:
        run = dataclasses.replace(run, start=dataclasses.replace(run.start, state=str(_beside(path, run.start.state, "start.state"))))
    if run.data.source != "stdlib" and not run.data.source.startswith(REMOTE):
        _beside(path, run.data.source, "data.source")
    swarm = dataclasses.replace(run.swarm, access="open")
    return dataclasses.replace(run, data=run.data.located(path.absolute().parent), swarm=swarm)


def _beside(run_file: Path, named: str, field: str) -> Path:
    """The absolute path of a file that a run file names, relative to the run file's folder."""
    path = (run_file.absolute().parent / Path(named).expanduser()).absolute()
    if not path.exists():
        raise ManifestError(f"{run_file}: {field}: {path}: no such file or folder", "correct that field")
    return path
