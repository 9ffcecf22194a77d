"""The table in plain values, for `peers` and `status`: what the control socket and a visitor print."""

from __future__ import annotations

from peerd.control.protocol import SCHEMA, PeerInfo, PeersReply, RunInfo, StageInfo
from peerd.policy.ledger import missing, stage_step, work_step
from peerd.swarm.membership import Membership, clock_s
from peerd.swarm.signed import SignedManifest
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView


class TableReport:
    """One run's table as one membership has it."""

    def __init__(self, signed: SignedManifest, membership: Membership) -> None:
        self._signed = signed
        self._membership = membership

    def run(self) -> RunInfo:
        manifest = self._signed.manifest
        return {
            "id": self._signed.run,
            "name": manifest.name,
            "num_stages": manifest.train.num_stages,
            "microbatches_per_step": manifest.train.microbatches_per_step,
            "steps": manifest.train.steps,
            "tokens_per_step": manifest.tokens_per_step,
            "boundary_bytes": manifest.boundary_bytes,
        }

    def peers(self, tokens_per_second: float) -> PeersReply:
        live, train = self._membership.live(), self._signed.manifest.train
        step = work_step(live, train.num_stages)
        return {
            "schema": SCHEMA,
            "run": self.run(),
            "work_step": step,
            "last_loss": self.last_loss(),
            "tokens_per_second": tokens_per_second,
            "stages": self.stages(step),
        }

    def last_loss(self) -> float | None:
        """Of the newest step that anybody tells of."""
        losses = [(record.step, record.last_loss) for record in self._membership.live().records if record.last_loss is not None]
        return max(losses)[1] if losses else None

    def stages(self, step: int | None) -> list[StageInfo]:
        """All stages, from one look at the table."""
        now_s, view, live = clock_s(), self._membership.view, self._membership.live()
        suspects = view.suspects(now_s)
        shown: dict[PeerId, PeerRecord] = {record.peer: record for record in live.records}
        shown |= {peer: view.sightings[peer].record for peer in suspects}
        by_stage: dict[int, list[PeerRecord]] = {}
        for record in sorted(shown.values(), key=lambda record: record.peer):
            by_stage.setdefault(record.stage, []).append(record)
        num_stages = self._signed.manifest.train.num_stages
        return [self._stage(stage, step, live, [self._peer(r, suspects) for r in by_stage.get(stage, [])]) for stage in range(num_stages)]

    def peer(self, record: PeerRecord) -> PeerInfo:
        return self._peer(record, self._membership.view.suspects(clock_s()))

    def _peer(self, record: PeerRecord, suspects: frozenset[PeerId]) -> PeerInfo:
        now_s = clock_s()
        seen = self._membership.view.sightings.get(record.peer)
        return {
            "id": record.peer,
            "stage": record.stage,
            "step": record.step,
            "phase": record.phase.name.lower(),
            "leaving": record.leaving,
            "suspect": record.peer in suspects,
            "queue": record.queue,
            "in_flight": record.in_flight,
            "done": record.done.bit_count(),
            "throughput": record.throughput,
            "tokens": record.tokens,
            "last_loss": record.last_loss,
            "device": record.device,
            "memory_bytes": record.memory_bytes,
            "software": record.software,
            "incarnation": record.incarnation,
            "inexact": record.lineage.inexact,
            "addresses": list(record.addresses),
            "age_s": max(0.0, now_s - seen.risen_at_s) if seen else 0.0,
        }

    def _stage(self, stage: int, step: int | None, live: LiveView, peers: list[PeerInfo]) -> StageInfo:
        """A stage with its live peers and those suspected; `missing` counts only while it works on the step."""
        train = self._signed.manifest.train
        newest = stage_step(live, stage)
        at_work = step is not None and newest == step and not any(r.phase is Phase.AVERAGED for r in live.members(stage, step))
        return {
            "stage": stage,
            "step": newest or 0,
            "missing": missing(live, stage, step or 0, train.microbatches_per_step).bit_count() if at_work else 0,
            "queue": sum(peer["queue"] for peer in peers),
            "throughput": sum(peer["throughput"] for peer in peers),
            "peers": peers,
        }
