"""What the daemon answers to the verbs of the control socket: the table and its own counters, as plain values."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from peerd.background import INTERNAL_ERRORS
from peerd.config.schedule import learning_rate_at
from peerd.control.protocol import SCHEMA, Counters, DirectInfo, HealthItem, OwnerInfo, PeerInfo, PeersReply, ReachInfo, RunInfo, UpdateInfo
from peerd.control.server import Say, Verb
from peerd.daemon.departure import Departure
from peerd.daemon.export import export_run
from peerd.daemon.node import Node
from peerd.daemon.swarm_replies import TableReport, evaluation_info
from peerd.daemon.volunteering import relay_info
from peerd.daemon.watching.history import number_in
from peerd.errors import PeerdError, TimedOutError, UsageError
from peerd.owner.governor import Governor
from peerd.policy.swarm.checkup import CAPPED
from peerd.policy.swarm.health import health
from peerd.table.record import Phase, Reach
from peerd.wire.dial_back import dial_backs

MAX_WAIT_S = 7 * 24 * 3600.0


class Answers:
    """One method per verb."""

    def __init__(self, node: Node, departure: Departure, governor: Governor, before: Answers | None = None) -> None:
        """`before` answered for the stage that this daemon served until now: its totals go on."""
        self._node = node
        self._departure = departure
        self._governor = governor
        self._started_s: float = before._started_s if before else time.monotonic()
        self._earlier: Mapping[str, int] = dict(before.counters()) if before else {}  # type: ignore[arg-type]
        self.dashboard_address: str = before.dashboard_address if before else ""
        self.moves: int = before.moves + 1 if before else 0
        self._table = TableReport(node.place.signed, node.membership)
        self._table.path_to = node.network.path_to

    def verbs(self) -> dict[str, Verb]:
        return {
            "status": self.status,
            "peers": self.peers,
            "wait": self.wait,
            "leave": self.leave,
            "export": self.export,
            **self._governor.verbs(),
            "reach": self.reach,
        }

    def resting_verbs(self, left: asyncio.Event) -> dict[str, Verb]:
        """What is answered otherwise while this peer rests."""

        async def not_now(_request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
            pause = self._governor.pause
            raise PeerdError(
                f"this peer is paused: {pause.reason if pause else 'it is about to go on'}", "`peerd resume` ends its owner's pause"
            )

        async def leave(_request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
            left.set()
            return {"schema": SCHEMA}

        return {"wait": not_now, "export": not_now, "reach": not_now, "leave": leave}

    async def status(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        node = self._node
        return {
            "schema": SCHEMA,
            "join": join_line(node),
            "pid": os.getpid(),
            "uptime_s": self.uptime_s,
            "tasks": len(asyncio.all_tasks()),
            "run": self._table.run(),
            "peer": self._own_row(),
            "counters": self.counters(),
            "decision": str(node.stepper.decision),
            "rebalancing": node.rebalance_reason,
            "moves": self.moves,
            "health": self.health(),
            "data": node.training.data_state,
            "evaluation": evaluation_info(node.training.evaluation),
            "compute_stand_in_ms": node.settings.compute_stand_in_ms,
            "slow_factor": node.service.pace.slow_factor,
            "dashboard": self.dashboard_address,
            "owner": cast("OwnerInfo", self._governor.fields()),
            "direct": self._direct(),
            "reach": self._reach(),
            "relay": relay_info(node),
            "update": self._update(),
            "links": [asdict(choice) | {"codec": str(choice.codec)} for choice in node.link_codecs.choices()],
        }

    def _direct(self) -> DirectInfo:
        direct = self._node.network.direct
        if direct is None:
            return {"port": 0, "peers": 0, "local": 0, "why": "switched off by --no-direct"}
        why = CAPPED if self._governor.throttles.capped else ""
        return {"port": direct.showing.port, "peers": direct.paths.num_open, "local": direct.paths.num_local, "why": why}

    def _update(self) -> UpdateInfo:
        state, train = self._node.state, self._node.place.manifest.train
        norm = state.gradient_norms.get(state.record.step - 1, math.inf)
        return {
            "learning_rate": learning_rate_at(train, state.record.step),
            "gradient_norm": norm if math.isfinite(norm) else None,
            "max_gradient_norm": train.max_gradient_norm,
            "loss_scale": state.passes.loss_scale,
        }

    def _reach(self) -> ReachInfo:
        found = self._node.reachability
        return {"state": found.reach.name.lower(), "reason": found.reason, "relays": list(found.relays)}

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    async def peers(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        return self.table()

    def run_info(self) -> RunInfo:
        return self._table.run()

    def ask_to_leave(self) -> None:
        """Drain and go; returns at once."""
        self._departure.ask_to_leave()

    async def ask_to_pause(self, yes: bool) -> None:
        """Or to go on; returns before what is held has been handed on."""
        await self._governor.obey("pause" if yes else "resume", {"wait": False})

    def table(self) -> PeersReply:
        """The whole swarm, in the words of the verb peers."""
        return cast("PeersReply", self._table.peers(self.tokens_per_second()))

    async def wait(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        step = number_in(request, "step", 0)
        deadline_s = time.monotonic() + min(MAX_WAIT_S, max(0.0, float(request.get("timeout_s", 60.0))))
        while True:
            record = self._node.state.record
            serving = record.phase is not Phase.JOINING
            if serving and record.step >= step:
                return {"schema": SCHEMA, "step": record.step, "serving": serving}
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                where = f"at step {record.step}" if serving else f"still joining ({self._node.stepper.decision.reason})"
                raise TimedOutError(f"this peer is {where}", "wait longer with --timeout, or look at `peerd status`")
            await self._node.membership.changed(min(left_s, 1.0))

    async def leave(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        await self._departure.leave(bool(request.get("now", False)))
        return {"schema": SCHEMA}

    async def export(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        folder = request.get("folder")
        if not isinstance(folder, str) or not Path(folder).is_absolute():
            raise UsageError("export needs an absolute folder")
        hugging_face = request.get("format") == "hf"
        return {"schema": SCHEMA, **await export_run(self._node, Path(folder), say, hugging_face)}

    async def reach(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        """Several peers dial back."""
        node, own = self._node, self._direct()
        others = [record.peer for record in node.membership.live().records if record.peer != node.membership.me]

        async def answers(port: int, *, direct: bool) -> list[dict[str, Any]]:
            found = await dial_backs(node.network.links, node.place.signed.run, others if port else (), port, direct=direct)
            return [asdict(each) for each in found]

        port = node.network.outside_port
        through_tunnel, by_tls = await asyncio.gather(answers(port, direct=False), answers(own["port"], direct=True))
        return {"schema": SCHEMA, "port": port, "answers": through_tunnel, "direct": {**own, "answers": by_tls}}

    def _own_row(self) -> PeerInfo:
        """My own row as it is now, not as it was last announced."""
        node = self._node
        published, measured = node.membership.find(node.membership.me), node.membership.row.vitals().measured()
        return self._table.peer(replace(node.state.record, version=published.version if published else 0, **measured))

    def tokens_per_second(self) -> float:
        """Over the last few committed steps, as this daemon saw them."""
        times = sorted(self._node.commit_times_s.items())[-10:]
        if len(times) < 2:
            return 0.0
        (first, began_s), (last, ended_s) = times[0], times[-1]
        step_s = (ended_s - began_s) / (last - first)
        ended_s = max(ended_s, time.time() - 2 * step_s)  # a run that stands still gets slower and slower
        tokens = sum(self._node.place.manifest.tokens_per_step_at(step) for step in range(first + 1, last + 1))
        return tokens / max(ended_s - began_s, 1e-9)

    def counters(self) -> Counters:
        total = {name: count + self._earlier.get(name, 0) for name, count in self._counters_of_stage().items()}  # type: ignore[operator]
        total["inexact_steps"] = self._node.state.record.lineage.inexact
        total["internal_errors"] = INTERNAL_ERRORS.count
        return cast("Counters", total)

    def _counters_of_stage(self) -> Counters:
        node = self._node
        traffic, trainer = node.network.links.traffic, node.trainer
        return {
            "accumulated_microbatches": node.service.counters.accumulated,
            "duplicate_microbatches": node.stepper.duplicates,
            "lost_microbatches": node.stepper.lost,
            "replayed_microbatches": node.dispatcher.counters.replayed + (trainer.counters.replayed if trainer else 0),
            "suppressed_microbatches": node.service.counters.suppressed,
            "inexact_steps": node.state.record.lineage.inexact,
            "ledger_resets": node.stepper.resets,
            "reloads": node.stepper.reloads,
            "rounds_failed": node.rounds.failed,
            "faults_seen": node.liveness.faults_seen,
            "boundary_crossings": traffic.boundary_crossings,
            "boundary_bytes": traffic.boundary_bytes,
            "bytes_sent": traffic.sent_bytes,
            "bytes_received": traffic.received_bytes,
            "messages_refused": node.door.refused + node.membership.messages_refused,
            "internal_errors": INTERNAL_ERRORS.count,
        }

    def health(self) -> list[HealthItem]:
        """What the user should know, most serious first."""
        node, pause = self._node, self._governor.pause
        if pause is not None:
            return [_item("paused", f"paused: {pause.reason}", "info", f"goes on {pause.until}")]
        items = [_item(item.code, item.title, item.severity, item.remedy) for item in health(node.facts())]
        if node.reachability.reach is Reach.CLIENT:
            remedy = "`peerd doctor` says which port to forward; a peer that can be dialled may volunteer with --relay"
            items.append(_item("unreachable", f"it reaches others, and they not it: {node.reachability.reason}", "warning", remedy))
        if INTERNAL_ERRORS.count:
            remedy = "please report it, with the lines of the log that say `internal error`"
            items.append(_item("internal-errors", f"internal errors of this daemon: {INTERNAL_ERRORS.count}", "warning", remedy))
        if node.p2pd_restarts:
            often = "once" if node.p2pd_restarts == 1 else f"{node.p2pd_restarts} times"
            items.append(_item("p2pd-restarted", f"p2pd was rebuilt {often}", "info", "nothing to do"))
        if node.service.pace.stand_in_s or node.service.pace.slow_factor > 1:
            items.append(_item("stand-in", "compute time is simulated or slowed on purpose", "info", "for benchmarks and tests only"))
        return items


def join_line(node: Node) -> str:
    """The address others paste: the most public one."""
    address = next(iter(node.reachability.addresses), f"/p2p/{node.membership.me}")
    return f"{address}#{node.place.signed.run}"


def _item(code: str, title: str, severity: str, remedy: str) -> HealthItem:
    return {"code": code, "title": title, "severity": severity, "remedy": remedy}
