"""The calling side of the Swarm service: records, descriptions of peers, contributions, accounts and timelines."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from peerd.config.access import RawList
from peerd.errors import BadMessageError, BusyError
from peerd.generated import swarm_pb2, swarm_pb2_grpc
from peerd.link.links import Links, answer_of
from peerd.policy.step.contributions import StageTally
from peerd.policy.swarm.spreading import MOST_PAGES, PAGE_RECORDS
from peerd.table.record import PeerId, RawRecord, RunId
from peerd.timeline.spans import Span
from peerd.wire import convert, timelines
from peerd.wire.accounts import AccountsTold, AccountsWanted, told_from, wanted_to
from peerd.wire.admission import Admission, Everybody
from peerd.wire.clients import Client
from peerd.wire.conversations import Conversations
from peerd.wire.messages import Description

CONVERSE = "/peerd.Swarm/Converse"


class SwarmClient(Client):
    stub_of = swarm_pb2_grpc.SwarmStub

    def __init__(self, links: Links, run: RunId, admission: Admission | None = None) -> None:
        """`admission` takes the lists that come with answers, and has this peer's invitation."""
        super().__init__(links, run)
        self._admission = admission or Everybody()
        self._conversations = Conversations(links, CONVERSE, swarm_pb2.GossipRequest.SerializeToString, swarm_pb2.GossipReply.FromString)

    async def _stub(self, peer: PeerId) -> Any:
        return self.stub_of(await self._links.channel(peer))

    _stub_to_ask = _stub

    async def tell(self, peer: PeerId, records: Sequence[RawRecord], timeout_s: float) -> tuple[RawRecord, ...]:
        """Push records over the fastest open channel. Returns the records that the peer sends back."""
        request = self._request(records=convert.records_to(records))
        return self._records_of(request, await self._conversations.ask(peer, request, timeout_s))

    async def tell_list(self, peer: PeerId, raw: RawList, timeout_s: float) -> None:
        """Hand the organiser's list on, in a call of its own."""
        request = self._request(access=convert.access_to(raw))
        self._records_of(request, await self._ask(peer, "Gossip", request, timeout_s))

    async def learn_list(self, peer: PeerId, timeout_s: float) -> None:
        """Ask for the organiser's list, which a peer tells also those whose other calls it refuses."""
        if (told := (await self.describe(peer, timeout_s)).access) is not None:
            self._admission.take(told)

    async def gossip(self, peer: PeerId, records: Sequence[RawRecord], timeout_s: float) -> tuple[RawRecord, ...]:
        """Push records in a separate call through the tunnel, which also shows whether the peer can be reached at all."""
        request = self._request(records=convert.records_to(records))
        return self._records_of(request, await self._ask_timed(peer, request, timeout_s))

    async def table(self, peer: PeerId, timeout_s: float) -> AsyncIterator[tuple[RawRecord, ...]]:
        """Yield the pages of the peer's whole table; `timeout_s` is for one page."""
        after = ""
        for _page in range(MOST_PAGES):
            request = self._request(want_all=True, after=after)
            reply = await self._ask_when_free(peer, "Gossip", request, timeout_s)
            yield self._records_of(request, reply, most=PAGE_RECORDS)
            if reply.next <= after:  # the last page, or a peer that begins anew
                return
            after = reply.next

    async def ask_for_news(self, peer: PeerId, known: Sequence[bytes], timeout_s: float) -> tuple[RawRecord, ...]:
        """Return the records that rose at `peer` recently, without those whose tags (policy/swarm/spreading.py) are in `known`."""
        request = self._request(want_news=True, known=convert.tags_to(known))
        return self._records_of(request, await self._ask_timed(peer, request, timeout_s))

    async def reaches(self, peer: PeerId, accused: PeerId, timeout_s: float) -> bool:
        """Return whether `accused`, which does not answer this peer, answers `peer`."""
        request = self._request(reach=accused)
        reply = await self._ask(peer, "Gossip", request, timeout_s)
        self._records_of(request, reply)
        return bool(reply.reached)

    def _request(self, **fields: Any) -> swarm_pb2.GossipRequest:
        """A request, with what the callee needs to let this peer in, and to tell it of a newer list."""
        admission = self._admission
        return swarm_pb2.GossipRequest(run=self._run, invitation=admission.invitation, listed=admission.version, **fields)

    def _records_of(
        self, request: swarm_pb2.GossipRequest, reply: swarm_pb2.GossipReply, most: int = convert.MAX_RECORDS
    ) -> tuple[RawRecord, ...]:
        self._links.traffic.sent_bytes += request.ByteSize()
        self._links.traffic.received_bytes += reply.ByteSize()
        if (told := convert.access_from(reply)) is not None:
            self._admission.take(told)
        return convert.records_from(reply.records, most)

    async def describe(self, peer: PeerId, timeout_s: float) -> Description:
        request = swarm_pb2.DescribeRequest()
        return convert.description_from(await self._ask_when_free(peer, "Describe", request, timeout_s, wait_for_ready=True))

    async def _ask_timed(self, peer: PeerId, request: swarm_pb2.GossipRequest, timeout_s: float) -> Any:
        """Ask what is answered at once, and note how long that took."""
        asked_s = time.monotonic()
        reply = await self._ask(peer, "Gossip", request, timeout_s)
        self._links.answer_times.took(time.monotonic() - asked_s, time.monotonic())
        return reply

    async def _ask_when_free(self, peer: PeerId, method: str, question: Any, timeout_s: float, **options: Any) -> Any:
        """Ask what a newcomer asks. Newcomers share few calls at a peer, which says when to come back; that is done for `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return await self._ask(peer, method, question, timeout_s, **options)
            except BusyError as error:
                if not error.retry_after_s or time.monotonic() + error.retry_after_s > until_s:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def contributions(self, peer: PeerId, timeout_s: float) -> tuple[StageTally, ...]:
        reply = await self._ask(peer, "Contributions", swarm_pb2.ContributionsRequest(run=self._run), timeout_s)
        self._links.traffic.received_bytes += reply.ByteSize()
        return convert.tallies_from(reply.stages)

    async def accounts(self, peer: PeerId, wanted: AccountsWanted, timeout_s: float) -> AccountsTold:
        """Ask for accounts of a stage. Their form is checked, and their signatures are not."""
        reply = await self._ask(peer, "Accounts", wanted_to(self._run, wanted), timeout_s)
        self._links.traffic.received_bytes += reply.ByteSize()
        return await asyncio.to_thread(told_from, reply, self._run, wanted, peer)

    async def timeline(self, peer: PeerId, steps: tuple[int, int], most: int, timeout_s: float) -> ReceivedTimeline:
        """Return what the peer did in the steps from the first to the last, at most `most` spans, and its clock."""
        stub = await self._stub(peer)
        request = swarm_pb2.TimelineRequest(run=self._run, first_step=steps[0], last_step=steps[1], most=most)
        asked_s = time.monotonic()
        reply = await answer_of(stub.Timeline(request, timeout=timeout_s))
        answered_s = time.monotonic()
        self._links.traffic.received_bytes += reply.ByteSize()
        if not math.isfinite(reply.clock_s):
            raise BadMessageError("the clock of the timeline is not finite")
        spans = await asyncio.to_thread(timelines.spans_from, reply) if most else []
        return ReceivedTimeline(spans=spans, complete=reply.complete, clock_s=reply.clock_s, asked_s=asked_s, answered_s=answered_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedTimeline:
    """A peer's spans and clock, in its time, and when the question left and the reply came, in this peer's time."""

    spans: Sequence[Span]
    complete: bool
    clock_s: float
    asked_s: float
    answered_s: float
