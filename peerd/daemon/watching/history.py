"""What the daemon answers about the past: the verbs history and contributions, and what it tells other peers of who computed what."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from peerd.config.schedule import learning_rate_at
from peerd.control.protocol import SCHEMA, AccountInfo, ContributionInfo, StageContributionsInfo, StepInfo
from peerd.control.server import Say, Verb
from peerd.errors import RemoteError, UsageError
from peerd.observe.archive import Archive
from peerd.observe.entries import Event
from peerd.peer_names import known_as
from peerd.policy.hashing import digest
from peerd.policy.step.accounts import WorkDone
from peerd.policy.step.contributions import Contribution, Report, StageContributions, StageTally, merge, why_impossible
from peerd.policy.step.leaderboard import SignedStage, nameless, with_signed, without_names
from peerd.policy.step.ledger import work_step
from peerd.stage.history import HistoryEntry
from peerd.swarm.clock import clock_s
from peerd.table.record import Evaluation, PeerId
from peerd.table.view import LiveView

if TYPE_CHECKING:
    from peerd.daemon.peer import Peer

MAX_STEPS_TOLD = 20_000
MAX_EVENTS_TOLD = 5_000
ASKED_PER_STAGE = 5
MAX_ASKED = 48
ASK_TIMEOUT_S = 3.0
TOLD_AGAIN_WITHIN_S = 2.0
"""Requests within this time get the same answer."""


class Past:
    """One daemon's past, of the run it is in."""

    def __init__(self, peer: Peer, archive: Archive) -> None:
        self._peer = peer
        self._archive = archive
        self._told: tuple[float, Sequence[StageTally]] = (float("-inf"), ())

    def verbs(self) -> dict[str, Verb]:
        return {"history": self.history, "contributions": self.contributions}

    async def history(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        since = number_in(request, "since", 0)
        events: list[Event] | None = []
        if request.get("events"):
            after = number_in(request, "after", 0)
            events = await self._archive.read(lambda store: store.events(after, MAX_EVENTS_TOLD))
        told = {event.peer for event in events or ()}
        present = self._peer.membership.live().records if told else ()
        names = {record.peer: name for record in present if record.peer in told and (name := known_as(record.nickname, record.team))}
        return {
            "schema": SCHEMA,
            "steps": await self.steps(since),
            "evaluations": [asdict(each) for each in await self.all_evaluations() if each.step >= since],
            "events": [asdict(event) for event in events or []],
            **({"names": names} if names else {}),
        }

    async def all_evaluations(self) -> Sequence[Evaluation]:
        return await self._archive.read(lambda store: store.evaluations(0, MAX_STEPS_TOLD)) or ()

    async def steps(self, since: int) -> list[StepInfo]:
        """Finished steps whose loss is known: of the file, and what this stage's own state remembers."""
        stored = await self._archive.read(lambda store: store.steps(since, MAX_STEPS_TOLD)) or []
        times = {entry.step: entry.time_s for entry in stored if entry.time_s is not None} | self._peer.seat.commits.times_s
        known = {entry.step: (entry.loss, entry.tokens) for entry in stored if entry.loss is not None}
        known |= {entry.step: (entry.loss, entry.tokens) for entry in self._remembered() if entry.step >= since}
        newest = sorted(known)[-MAX_STEPS_TOLD:]
        # They may be thousands, and others get their turn while a thread goes through them.
        return await asyncio.to_thread(lambda: [self._step(step, *known[step], times.get(step, 0.0)) for step in newest])

    def _step(self, step: int, loss: float, tokens: int, time_s: float) -> StepInfo:
        norm = self._peer.seat.state.gradient_norms.get(step)
        return {
            "step": step,
            "loss": loss,
            "tokens": tokens,
            "time_s": time_s,
            "learning_rate": learning_rate_at(self._peer.place.manifest.train, step),
            "gradient_norm": norm if norm is not None and math.isfinite(norm) else None,
            "overflowed": norm == math.inf,
        }

    def _remembered(self) -> list[HistoryEntry]:
        """What the stage's state knows of finished steps, but for one that the torch thread has not quite finished: it has no time yet."""
        entries, committed = self._peer.seat.state.history[-MAX_STEPS_TOLD:], self._peer.seat.commits.times_s
        under_way = max(committed, default=-1) + 1
        return [entry for entry in entries if not committed or entry.step != under_way]

    async def contributions(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        manifest = self._peer.place.manifest
        num_stages, per_step = manifest.train.num_stages, manifest.train.microbatches_per_step
        live = self._peer.membership.live()
        asked = _whom_to_ask(live, num_stages)
        answers = await asyncio.gather(*(self._ask(peer) for peer in asked))
        mine = await self.tallies()
        told = [(self._peer.membership.me, mine), *zip(asked, answers, strict=True)]
        reached = 1 + max([work_step(live, num_stages) or 0, *(tally.last_step for tally in mine)])
        reports = [
            Report(reporter=reporter, tally=tally)
            for reporter, tallies in told
            for tally in tallies
            if why_impossible(tally, num_stages, reached, per_step, manifest.tokens_per_microbatch_at) is None
        ]
        unlisted = await self._unlisted(live)
        merged = merge(reports, reached + 1, per_step, self._peer.membership.me)
        stages = [await self._stage(found, asked, unlisted, reached + 1) for found in merged]
        named = [r for r in live.records if r.peer not in unlisted]
        names, teams = ({r.peer: told for r in named if (told := getattr(r, name))} for name in ("nickname", "team"))
        reply = {"schema": SCHEMA, "me": self._peer.membership.me, "run": manifest.name, "num_stages": num_stages, "stages": stages}
        return {**reply, "names": names, "teams": teams}

    async def _unlisted(self, live: LiveView) -> set[PeerId]:
        """Those that are to be named nowhere. This daemon's own user sees its row as it is."""
        known = await self._archive.read(lambda store: store.unlisted()) or set()
        there = {record.peer: record.unlisted for record in live.records}
        return {peer for peer in known | there.keys() if there.get(peer, peer in known)} - {self._peer.membership.me}

    async def _stage(self, told: StageContributions, asked: Sequence[PeerId], unlisted: set[PeerId], span: int) -> StageContributionsInfo:
        """The rows of a stage, with what its members have signed of them. The run has had `span` steps."""
        serving = {record.peer for record in self._peer.membership.live().serving(told.stage)}
        signed = await self._peer.accounting.signed_stage(told.stage, [peer for peer in asked if peer in serving])
        per_step = self._peer.place.manifest.train.microbatches_per_step
        found = without_names(with_signed(told, signed, span, per_step) if signed is not None else told, unlisted)
        tokens = self._peer.place.manifest.tokens_per_microbatch_at(found.last_step)
        info: StageContributionsInfo = {
            "stage": found.stage,
            "first_step": found.first_step,
            "last_step": found.last_step,
            "steps": found.steps,
            "peers": [_row(row, tokens) for row in found.rows],
        }
        if signed is not None:
            rows, week = nameless(signed.rows, unlisted), nameless(signed.week, unlisted)
            for row in info["peers"]:
                name = PeerId(row["peer"])
                row["signed_tokens"], row["week_tokens"] = rows.get(name, WorkDone()).tokens, week.get(name, WorkDone()).tokens
            info["account"] = account_info(signed)
        return info

    async def tallies(self) -> Sequence[StageTally]:
        """What this daemon counted itself."""
        told_s, tallies = self._told
        if clock_s() - told_s > TOLD_AGAIN_WITHIN_S:
            tallies = await self._archive.read(lambda store: store.tallies()) or ()
            self._told = (clock_s(), tallies)
        return tallies

    async def _ask(self, peer: PeerId) -> Sequence[StageTally]:
        try:
            return await self._peer.swarm_client.contributions(peer, ASK_TIMEOUT_S)
        except RemoteError:
            return ()


def account_info(signed: SignedStage) -> AccountInfo:
    """The account of a stage, and since when its week is counted."""
    account = signed.signed.account
    signers = set(account.signers).intersection(each.signer for each in signed.signed.vouches)
    return {
        "step": account.step,
        "id": account.id.hex(),
        "signatures": len(signers),
        "signers": len(account.signers),
        "signed_s": signed.signed.time_s,
        "week_from_s": signed.since_s,
    }


def _row(row: Contribution, tokens: int) -> ContributionInfo:
    """`tokens` are a microbatch's, for what was counted in microbatches alone: then they are the most that it can be."""
    told = row.tokens or row.microbatches * tokens
    return {"peer": row.peer, "steps": row.steps, "microbatches": row.microbatches, "tokens": told, "reporter": row.reporter}


def _whom_to_ask(live: LiveView, num_stages: int) -> list[PeerId]:
    """A few peers of each stage, drawn by this peer's id. What peers say of themselves does not draw them: liars would be asked alone."""
    chosen: list[PeerId] = []
    for stage in range(num_stages):
        others = [record.peer for record in live.serving(stage) if record.peer != live.me]
        chosen += sorted(others, key=lambda peer: digest("asks", live.me, peer, size=8))[:ASKED_PER_STAGE]
    return chosen[:MAX_ASKED]


def number_in(request: Mapping[str, Any], name: str, default: int) -> int:
    value = request.get(name, default)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise UsageError(f"{name} must be a whole number")
    return value
