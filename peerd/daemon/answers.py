"""The daemon's answers to the verbs of the control socket: the table and its own counters, as plain values."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from peerd.background import INTERNAL_ERRORS
from peerd.control.protocol import (
    SCHEMA,
    ComputingInfo,
    Counters,
    DirectInfo,
    HealthItem,
    JoinInfo,
    MemoryInfo,
    OwnerInfo,
    PeerInfo,
    PeersReply,
    RunInfo,
)
from peerd.control.server import Say, Verb
from peerd.control.teller import Teller
from peerd.daemon.audit_replies import audits_info
from peerd.daemon.departure import Departure
from peerd.daemon.device import lacks, memory_of
from peerd.daemon.export import export_run
from peerd.daemon.link_needs import longest_round_s, needs, slow_mates, why_unaveraged
from peerd.daemon.open_files import limit, num_open
from peerd.daemon.peer import Peer
from peerd.daemon.seat import Seat
from peerd.daemon.swarm_replies import TableReport, access_info, evaluation_info, line_infos, update_info
from peerd.daemon.text_replies import texts_info
from peerd.daemon.volunteering import reach_info, relay_info
from peerd.daemon.watching.history import number_in
from peerd.errors import DivergedError, PeerdError, TimedOutError, UsageError
from peerd.policy.round.needs import shortfall
from peerd.policy.step.contributions import UNAVERAGED_STEPS
from peerd.policy.swarm.checkup import CAPPED, TOO_SLOW
from peerd.policy.swarm.clocks import Whose
from peerd.policy.swarm.health import Facts, HealthNote, health, open_files, unwritten_files
from peerd.policy.swarm.pace import way_s
from peerd.swarm.clock import clock_s
from peerd.table.record import Phase, Reach
from peerd.unwritten import UNWRITTEN
from peerd.wire.dial_back import dial_backs

MORE_MEMORY = "close other programs that use the device's memory, or allow more with `peerd limits --memory`"
OTHER_DEVICE = "use another --device, or join a run of another train.precision; its organiser chooses that"
MAX_WAIT_S = 7 * 24 * 3600.0
TAKES_STAGE = "taking a stage"  # the last decision was about one that this peer has left


class Answers:
    """One method per verb."""

    def __init__(self, peer: Peer, departure: Departure, dashboard_address: str) -> None:
        self._peer = peer
        self._departure = departure
        self._governor = peer.governor
        self._started_s = time.monotonic()
        self._dashboard_address = dashboard_address
        self._table = TableReport(
            peer.place.signed,
            peer.membership,
            peer.network.path_to,
            lambda other: peer.notes.still_s(other),
            peer.gossip.position.round_trip_s,
        )

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

    async def status(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        peer, seat = self._peer, self._peer.seat
        return {
            "schema": SCHEMA,
            "join": join_line(peer),
            "pid": os.getpid(),
            "uptime_s": self.uptime_s,
            "tasks": len(asyncio.all_tasks()),
            "run": self._table.run(),
            "peer": self._own_row(),
            "counters": self.counters(),
            "computing": self._computing(),
            **self._memory(),
            "decision": TAKES_STAGE if seat.is_left else str(seat.stepper.decision),
            "joining": self._joining(),
            "rebalancing": seat.rebalance_reason,
            "moves": peer.moves,
            "health": self.health(),
            "data": peer.data.state,
            "evaluation": evaluation_info(seat.training.evaluation),
            "compute_stand_in_ms": peer.settings.compute_stand_in_ms,
            "slow_factor": seat.service.pace.slow_factor,
            "dashboard": self._dashboard_address,
            "owner": cast("OwnerInfo", self._governor.fields()),
            "access": access_info(peer.membership.access),
            "audits": audits_info(peer),
            "texts": texts_info(peer),
            "direct": self._direct(),
            "reach": reach_info(peer),
            "relay": relay_info(peer),
            "update": update_info(seat.state, peer.place.manifest.train),
            "lines": line_infos(peer.network.links.traffic, peer.membership.live(), peer.network.path_to),
            "links": [asdict(choice) | {"codec": str(choice.codec)} for choice in seat.link_codecs.choices()],
        }

    def _computing(self) -> ComputingInfo | None:
        computing, now_s = self._peer.seat.service.computing, time.monotonic()
        found = computing.present
        if found is None:
            return None
        return {"step": found.step, "index": found.index, "for_s": now_s - found.since_s, "usual_s": computing.usual_s()}

    def _memory(self) -> dict[str, MemoryInfo]:
        """The device's memory, unless no file may be opened to read it."""
        peer, seat = self._peer, self._peer.seat
        try:
            found = memory_of(peer.governor.device)
        except OSError:
            return {}
        told = peer.room_wanted or seat.service.shortage.told
        memory: MemoryInfo = {
            "total": found.total,
            "used": found.used,
            "held": found.held,
            "shortage": told,
            "slots": seat.service.slots,
            "offloads": seat.state.holdings.places.offloads,
        }
        return {"memory": memory}

    def _joining(self) -> JoinInfo | None:
        """How far this peer is on its way into its stage, and its plan; None once it serves, and where it has left its stage."""
        seat, live = self._peer.seat, self._peer.membership.live()
        if seat.is_left or seat.state.record.phase is not Phase.JOINING:
            return None
        joining, now_s = seat.stepper.joining, clock_s()
        found, plan = joining.progress(live, now_s), seat.stepper.proving.planned(joining.plan(live, now_s))
        return {
            "bytes": found.bytes_total,
            "bytes_left": found.bytes_left,
            "steps_behind": found.steps_behind,
            "ready_s": plan.ready_s if plan.ready_s is not None and math.isfinite(plan.ready_s) else None,
            "can_catch_up": not joining.waits,
            "plan": plan.text,
        }

    def _direct(self) -> DirectInfo:
        direct = self._peer.network.direct
        if direct is None:
            return {"port": 0, "peers": 0, "local": 0, "why": "switched off by --no-direct"}
        return direct.told(CAPPED if self._governor.throttles.capped else "")

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    async def peers(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        return self.table()

    def run_info(self) -> RunInfo:
        return self._table.run()

    def ask_to_leave(self) -> None:
        """Begin to drain and leave; returns at once."""
        self._departure.ask_to_leave()

    async def ask_to_pause(self, yes: bool) -> None:
        """Begin to pause or go on; returns before held microbatches are handed on."""
        await self._governor.obey("pause" if yes else "resume", {"wait": False})

    def table(self) -> PeersReply:
        """Return the whole table, as the verb peers does."""
        return cast(
            "PeersReply",
            {**self._table.peers(self.tokens_per_second()), "audits": audits_info(self._peer), "outdated": self._peer.is_resting},
        )

    async def wait(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        step = number_in(request, "step", 0)
        deadline_s = time.monotonic() + min(MAX_WAIT_S, max(0.0, float(request.get("timeout_s", 60.0))))
        while True:
            record = self._seat_served().state.record
            serving = record.phase is not Phase.JOINING
            if serving and record.step >= step:
                return {"schema": SCHEMA, "step": record.step, "serving": serving}
            diverged = next((item for item in self.health() if item["code"] == "diverged"), None)
            if diverged is not None:
                raise DivergedError(diverged["title"], diverged["remedy"])
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                where = f"at step {record.step}" if serving else f"still joining ({self._peer.seat.stepper.decision.reason})"
                raise TimedOutError(f"this peer is {where}", "wait longer with --timeout, or look at `peerd status`")
            await self._peer.membership.changed(min(left_s, 1.0))

    async def leave(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        await Teller(say, look=self._left_to_do).through(self._departure.leave(bool(request.get("now", False))))
        return {"schema": SCHEMA}

    def _left_to_do(self) -> str:
        """What this peer does before it leaves, which takes as long as its microbatches and the step do."""
        seat = self._peer.seat
        held, step = seat.service.queue, seat.state.record.step
        if held:
            return f"finishing {held} microbatch{'es' if held > 1 else ''} of step {step}"
        return f"handing on its share of step {step}"

    async def export(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        folder = request.get("folder")
        if not isinstance(folder, str) or not Path(folder).is_absolute():
            raise UsageError("export needs an absolute folder")
        self._seat_served()
        timeout_s = float(request.get("timeout_s", math.inf))
        return {"schema": SCHEMA, **await export_run(self._peer, Path(folder), say, timeout_s, request.get("format") == "hf")}

    async def reach(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        """Ask several peers to dial back."""
        self._seat_served()
        peer, own = self._peer, self._direct()
        others = [record.peer for record in peer.membership.live().records if record.peer != peer.membership.me]

        async def answers(port: int, *, direct: bool) -> list[dict[str, Any]]:
            found = await dial_backs(peer.network.links, peer.place.signed.run, others if port else (), port, direct=direct)
            return [asdict(each) for each in found]

        port = peer.network.outside_port
        through_tunnel, by_tls = await asyncio.gather(answers(port, direct=False), answers(own["port"], direct=True))
        return {"schema": SCHEMA, "port": port, "answers": through_tunnel, "direct": {**own, "answers": by_tls}}

    def _own_row(self) -> PeerInfo:
        """Return this peer's row as it is now, not as last announced."""
        peer, seat = self._peer, self._peer.seat
        published, measured = peer.membership.find(peer.membership.me), peer.membership.row.vitals().measured()
        return self._table.peer(replace(seat.state.record, version=published.version if published else 0, **measured))

    def tokens_per_second(self) -> float:
        """Return the speed over the last few committed steps, as this daemon saw them; 0 while it rests, and sees none."""
        times = self._peer.seat.commits.recent
        if len(times) < 2 or self._peer.is_resting:
            return 0.0
        began_s, ended_s = times[0][1], times[-1][1]
        step_s = (ended_s - began_s) / (len(times) - 1)
        ended_s = max(ended_s, time.monotonic() - 2 * step_s)  # a run that stands still gets slower and slower
        tokens = sum(self._peer.place.manifest.tokens_per_step_at(step) for step, _ in list(times)[1:])  # a run may go back
        return tokens / max(ended_s - began_s, 1e-9)

    def counters(self) -> Counters:
        """Return totals since the daemon started, over all stages that it has served."""
        peer, seat = self._peer, self._peer.seat
        traffic = peer.network.links.traffic
        found: dict[str, int] = {
            **{name: count + peer.earlier_counts[name] for name, count in seat.counts().items()},
            "inexact_steps": seat.state.record.lineage.inexact,
            "faults_seen": peer.liveness.faults_seen,
            "boundary_crossings": traffic.boundary_crossings,
            "boundary_bytes": traffic.boundary_bytes,
            "bytes_sent": traffic.sent_bytes,
            "bytes_received": traffic.received_bytes,
            "messages_refused": peer.door.refused + peer.membership.messages_refused,
            "calls_put_off": peer.door.calls.refused,
            "internal_errors": INTERNAL_ERRORS.count,
        }
        return cast("Counters", found)

    def _seat_served(self) -> Seat:
        """Return the current seat. Raises PeerdError while this peer rests."""
        if self._peer.is_resting:
            pause = self._governor.pause
            if pause is None and self._peer.room_wanted:
                raise PeerdError(f"this peer waits for memory: {self._peer.room_wanted}", "it goes on by itself once there is enough")
            reason = pause.reason if pause else "it is about to go on"
            raise PeerdError(f"this peer is paused: {reason}", "`peerd resume` ends its owner's pause")
        return self._peer.seat

    def _facts(self) -> Facts:
        """Return the facts that this peer's health is derived from."""
        peer, seat, train = self._peer, self._peer.seat, self._peer.place.manifest.train
        me, met, live = peer.membership.me, peer.membership.view.sightings, peer.membership.live()
        up, down = peer.network.links.traffic.line.claims(self._governor.limits)
        joining = self._joining()
        return Facts(
            mine=replace(seat.state.record, unaveraged=seat.unaveraged, up=up, down=down),
            live=live,
            num_stages=train.num_stages,
            num_microbatches=train.microbatches_per_step,
            decision=TAKES_STAGE if seat.is_left else seat.stepper.decision.reason,
            join_plan=joining["plan"] if joining else "",
            cannot_catch_up=bool(joining and not joining["can_catch_up"]),
            disputed=seat.stepper.proving.disputed,
            progress=peer.notes.progress,
            now_s=clock_s(),
            rounds_s=longest_round_s(peer.place.manifest, live),
            microbatch_s=way_s(live, train.num_stages, train.microbatch_size),
            lifetime_s=peer.membership.view.ttl_s,
            has_met_others=any(seen.record.peer != me and not seen.record.leaving for seen in met.values()),
            complete=bool(train.steps) and seat.state.record.step >= train.steps,
            computed=seat.service.counters.accumulated + peer.earlier_counts["accumulated_microbatches"],
            contradictory=peer.membership.contradictory - peer.cases.losers,
            convicted=peer.cases.losers,
            own_fault=peer.cases.own_fault,
            banned=peer.membership.access.listed.banned,
            invitation_ends=peer.membership.access.ends_soon,
            lets_drift=not peer.place.manifest.may_average_parameters,
            why_unaveraged=partial(why_unaveraged, peer.place.manifest, live),
        )

    def health(self) -> list[HealthItem]:
        """What the user should know, most serious first."""
        pause = self._governor.pause
        if pause is not None:
            return [
                *_items(unwritten_files(UNWRITTEN.errors())),
                _item("paused", f"paused: {pause.reason}", "info", f"goes on {pause.until}"),
            ]
        if self._peer.room_wanted:
            waits = _item("no-memory", f"waits for memory: {self._peer.room_wanted}", "warning", MORE_MEMORY)
            return [*_items(unwritten_files(UNWRITTEN.errors())), waits]
        files = open_files(num_open(), limit(), max(1, len(self._peer.membership.live().records) - 1))
        return [*_items([*unwritten_files(UNWRITTEN.errors()), *files, *health(self._facts())]), *self._own_items()]

    def _own_items(self) -> list[HealthItem]:
        """What belongs to this daemon and not to the run."""
        peer, items = self._peer, list[HealthItem]()
        if peer.reachability.reach is Reach.CLIENT:
            remedy = "`peerd doctor` says which port to forward; a peer that can be dialled may volunteer with --relay"
            items.append(_item("unreachable", f"it reaches others, and they not it: {peer.reachability.reason}", "warning", remedy))
        if told := peer.seat.service.shortage.told or _outgrew(peer):
            items.append(_item("memory", told, "warning", MORE_MEMORY))
        if lack := lacks(peer.governor.device, peer.place.manifest.train.precision):
            items.append(_item("precision", lack, "warning", OTHER_DEVICE))
        if short := self._slow_line():
            items.append(_item("slow-line", short, "warning", TOO_SLOW))
        if slow := slow_mates(peer.place.manifest, peer.membership.live(), peer.seat.stage):
            items.append(_item("slow-mates", f"the averages of this stage wait for {'; '.join(slow)}", "info", "the run stays exact"))
        clocks = peer.clocks.verdict
        if clocks.whose is Whose.MINE:
            items.append(_item("clock", clocks.title, "problem", clocks.remedy))
        elif clocks.whose is not Whose.NOBODYS:
            items.append(_item("clocks-differ", clocks.title, "warning", clocks.remedy))
        if INTERNAL_ERRORS.count:
            remedy = "please report it, with the lines of the log that say `internal error`"
            items.append(_item("internal-errors", f"internal errors of this daemon: {INTERNAL_ERRORS.count}", "warning", remedy))
        if peer.p2pd_problem:
            why = f"p2pd, the networking process, does not start: {peer.p2pd_problem}"
            items.append(_item("p2pd-down", why, "problem", "remove the cause; the daemon tries again every few seconds"))
        if peer.p2pd_restarts:
            often = "once" if peer.p2pd_restarts == 1 else f"{peer.p2pd_restarts} times"
            items.append(_item("p2pd-restarted", f"p2pd was rebuilt {often}", "info", "nothing to do"))
        if peer.seat.service.pace.stand_in_s or peer.seat.service.pace.slow_factor > 1:
            items.append(_item("stand-in", "compute time is simulated or slowed on purpose", "info", "for benchmarks and tests only"))
        return items

    def _slow_line(self) -> str:
        """What this machine's line lacks for the averages of its stage, before they have left it out."""
        peer, seat = self._peer, self._peer.seat
        line = peer.network.links.traffic.line
        if seat.unaveraged >= UNAVERAGED_STEPS or not line.is_sound:
            return ""
        num_joining = int(seat.state.record.phase is Phase.JOINING)
        needed = needs(peer.place.manifest, peer.membership.live(), num_joining)[seat.stage].rounds
        short = shortfall(*line.claims(self._governor.limits), needed)
        return short and f"this stage {short}"


def _outgrew(peer: Peer) -> str:
    """That this peer serves this stage because the device's memory did not suffice for another one; else empty."""
    if peer.outgrew in (-1, peer.seat.stage):
        return ""
    return f"the device's memory did not suffice for stage {peer.outgrew}: this peer serves another one"


def join_line(peer: Peer) -> str:
    """Return the address with which others join: the most public one."""
    address = next(iter(peer.reachability.addresses), f"/p2p/{peer.membership.me}")
    return f"{address}#{peer.place.signed.run}"


def _items(notes: Sequence[HealthNote]) -> list[HealthItem]:
    return [_item(note.code, note.title, note.severity, note.remedy) for note in notes]


def _item(code: str, title: str, severity: str, remedy: str) -> HealthItem:
    return {"code": code, "title": title, "severity": severity, "remedy": remedy}
