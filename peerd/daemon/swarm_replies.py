"""The table as plain values for `peers` and `status`, which the control socket and a visitor return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from peerd.config.schedule import learning_rate_at
from peerd.config.train_config import TrainConfig
from peerd.control.protocol import SCHEMA, AccessInfo, EvaluationInfo, LineInfo, PathInfo, PeerInfo, RunInfo, StageInfo, UpdateInfo
from peerd.link.traffic import Traffic
from peerd.policy.step.ledger import missing, stage_step, work_step
from peerd.policy.step.losses import newest_loss
from peerd.policy.swarm.coordinates import seconds_of
from peerd.policy.swarm.health import unaveraged_for
from peerd.stage.state import StageState
from peerd.swarm.access import RunAccess
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedManifest
from peerd.table.record import Evaluation, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.train.evaluator import evaluation_of

ROW = [name for name in PeerInfo.__annotations__ if name not in PathInfo.__annotations__ and name != "round_trip_s"]
"""The fields told of a peer: those of its record with these names, and values derived from the record and the view."""


def evaluation_info(evaluation: Evaluation | None) -> EvaluationInfo | None:
    return None if evaluation is None else {"step": evaluation.step, "loss": evaluation.loss}


def update_info(state: StageState, train: TrainConfig) -> UpdateInfo:
    """How this peer's stage updates its parameters now."""
    norm = state.gradient_norms.get(state.record.step - 1, math.inf)
    return {
        "learning_rate": learning_rate_at(train, state.record.step),
        "gradient_norm": norm if math.isfinite(norm) else None,
        "max_gradient_norm": train.max_gradient_norm,
        "loss_scale": state.holdings.passes.loss_scale,
        "local_batch": train.local_batch,
        "optimizer": train.optimizer,
        "optimizer_bits": train.optimizer_bits,
        "drift": state.holdings.drift,
    }


def line_infos(traffic: Traffic, live: LiveView, path_to: Callable[[PeerId], PathInfo]) -> list[LineInfo]:
    """What is known of the lines of other live peers, and of the ways to them."""
    found = list[LineInfo]()
    for record in live.records:
        (sends, receives), (up, down) = traffic.rates(record.peer), traffic.line.rates_of(record)
        if record.peer != live.me and any(rate is not None for rate in (sends, receives, up, down)):
            found.append({"peer": record.peer, "sends": sends, "receives": receives, "up": up, "down": down, **path_to(record.peer)})
    return found


def path_unknown(_peer: PeerId) -> PathInfo:
    return {}


def never_asked(_record: PeerRecord) -> None:
    return None


def not_watched(_peer: PeerId) -> float:
    return 0.0


def access_info(access: RunAccess) -> AccessInfo:
    """Tell who may take part, as this peer knows it."""
    banned = sorted(access.listed.banned.items())
    return {
        "by_invitation": access.by_invitation,
        "number": access.number,
        "allowed": len(access.listed.allowed),
        "banned": [{"peer": peer, "reason": reason} for peer, reason in banned],
        "invited_until": access.invited_until_s,
        "refused": access.refused,
    }


class TableReport:
    """The table of a run, as a membership has it."""

    def __init__(
        self,
        signed: SignedManifest,
        membership: Membership,
        path_to: Callable[[PeerId], PathInfo] = path_unknown,
        still_s: Callable[[PeerId], float] = not_watched,
        round_trip_s: Callable[[PeerRecord], float | None] = never_asked,
    ) -> None:
        """`path_to` returns how tensors travel to a peer, `still_s` for how long its work has looked the same, s."""
        self._signed = signed
        self._membership = membership
        self._path_to = path_to
        self._still_s = still_s
        self._round_trip_s = round_trip_s

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
            "group_size": manifest.swarm.group_size,
            "local_batch": manifest.train.local_batch,
            "local_steps_after": manifest.train.local_steps_after,
            "about": manifest.about.told,
        }

    def peers(self, tokens_per_second: float) -> Mapping[str, Any]:
        live, suspects, train = self._membership.live(), self._suspects(), self._signed.manifest.train
        step = work_step(live, train.num_stages)
        return {
            "schema": SCHEMA,
            "run": self.run(),
            "work_step": step,
            "last_loss": newest_loss(live, train.num_stages),
            "evaluation": evaluation_info(evaluation_of(live, self._signed.manifest, None)),
            "tokens_per_second": tokens_per_second,
            "stages": [self._stage(stage, step, live, suspects) for stage in range(train.num_stages)],
            "access": access_info(self._membership.access),
        }

    def peer(self, record: PeerRecord) -> PeerInfo:
        return self._peer(record, self._suspects())

    def _suspects(self) -> frozenset[PeerId]:
        return frozenset(record.peer for record in self._membership.live().suspected)

    def _peer(self, record: PeerRecord, suspects: frozenset[PeerId]) -> PeerInfo:
        now_s = clock_s()
        seen = self._membership.view.sightings.get(record.peer)
        is_sidelined = record.peer in self._membership.live().sidelined(record.stage)
        phase = "unaveraged" if unaveraged_for(record) else record.phase.name.lower()
        derived: dict[str, Any] = {
            "id": record.peer,
            "phase": "sidelined" if is_sidelined else phase,
            "suspect": record.peer in suspects,
            "done": record.done.bit_count(),
            "next_done": record.next_done.bit_count(),
            "inexact": record.lineage.inexact,
            "addresses": list(record.addresses),
            "coordinate": seconds_of(record.coordinate) if record.coordinate is not None else None,
            "reach": record.reach.name.lower(),
            "age_s": max(0.0, now_s - seen.risen_at_s) if seen else 0.0,
            "still_s": self._still_s(record.peer),
            "microbatch_s": self._signed.manifest.train.microbatch_size / computed
            if (computed := record.computes or record.throughput) > 0
            else 0.0,
        }
        row = {name: derived[name] if name in derived else getattr(record, name) for name in ROW}
        if record.peer != self._membership.me:
            row |= {"round_trip_s": self._round_trip_s(record)}
            row |= self._path_to(record.peer)
        return cast("PeerInfo", row)

    def _stage(self, stage: int, step: int | None, live: LiveView, suspects: frozenset[PeerId]) -> StageInfo:
        """Return a stage with its live and suspected peers. `missing` is 0 unless the stage works on the step."""
        train = self._signed.manifest.train
        newest = stage_step(live, stage)
        at_work = step is not None and newest == step and not any(r.phase is Phase.AVERAGED for r in live.members(stage, step))
        peers = [self._peer(record, suspects) for record in self._shown(stage, live, suspects)]
        told = live.summary(stage)  # only for a distant stage of a large swarm, whose peers are not all known here
        return {
            "stage": stage,
            "num_peers": max(len(peers), live.num_serving(stage)),
            "step": newest or 0,
            "missing": missing(live, stage, step or 0, train.microbatches_per_step).bit_count() if at_work else 0,
            "queue": told.queue if told else sum(peer["queue"] for peer in peers),
            "throughput": told.throughput if told else sum(peer["throughput"] for peer in peers),
            "peers": peers,
        }

    def _shown(self, stage: int, live: LiveView, suspects: frozenset[PeerId]) -> list[PeerRecord]:
        sightings = self._membership.view.sightings
        shown: dict[PeerId, PeerRecord] = {r.peer: r for r in live.records}
        shown |= {peer: sightings[peer].record for peer in suspects}
        return sorted((record for record in shown.values() if record.stage == stage), key=lambda record: record.peer)
