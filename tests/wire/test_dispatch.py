"""Sending a microbatch: another peer when one fails, no blame for one that only cannot just now, and an end to patience."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest

from peerd.errors import (
    BadMessageError,
    BlamelessError,
    BusyError,
    ChangedLabelsError,
    NotFiniteError,
    PeerGoneError,
    RemoteError,
    UnheardError,
    WrongStateError,
)
from peerd.table.record import PeerId, PeerRecord, Phase, RawRecord
from peerd.table.view import LiveView
from peerd.wire import dispatch
from peerd.wire.clients import StageClient
from peerd.wire.dispatch import Dispatcher
from peerd.wire.messages import Call, CallResult, TensorBytes
from tests.strategies import FULL, member, view_of

A, B = PeerId("a"), PeerId("b")
OWN: RawRecord = (b"own", b"signature")
TENSOR = TensorBytes("float32", (1,), (bytes(4),))


@dataclass
class Table:
    """A table that changes only when a test says so; what is waited for comes at once."""

    records: tuple[PeerRecord, ...]
    waits: int = 0

    def live(self) -> LiveView:
        return view_of(*self.records)

    def absorb(self, raws: Sequence[RawRecord], sender: PeerId) -> Sequence[RawRecord]:
        return raws

    async def changed(self, timeout_s: float) -> bool:
        self.waits += 1
        return True


@dataclass
class Client:
    """Peers on paper: each has a list of what it answers, and succeeds when the list is used up."""

    answers: dict[PeerId, list[RemoteError]] = field(default_factory=dict)
    asked: list[PeerId] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    told: list[tuple[RawRecord, ...]] = field(default_factory=list)
    """The records that came with each call."""
    goes_on: bool = True
    works_s: float = 0.0
    """How long a peer works before it fails."""
    paths: list[dict[int, PeerId]] = field(default_factory=list)
    cancelled: list[PeerId] = field(default_factory=list)
    losses: dict[PeerId, float] = field(default_factory=dict)
    gradient: TensorBytes | None = TENSOR
    records: tuple[RawRecord, ...] = ()
    """What comes with each reply."""

    async def backpropagate(
        self, peer: PeerId, call: Call, records: Sequence[RawRecord], _patience_s: float, on_forwarded: Callable[[int, PeerId], None]
    ) -> CallResult:
        self.asked.append(peer)
        self.told.append(tuple(records))
        self.paths.append(dict(call.path))
        self.again.append(call.again)
        if self.goes_on:
            on_forwarded(2, PeerId("later"))
        if left := self.answers.get(peer):
            await asyncio.sleep(self.works_s)
            raise left.pop(0)
        return CallResult(gradient=self.gradient, downstream_s=0.0, records=self.records, loss=self.losses.get(peer))

    async def cancel(self, peer: PeerId, _call_id: bytes, _timeout_s: float) -> None:
        self.cancelled.append(peer)


def call(step: int = 3, path: dict[int, PeerId] | None = None) -> Call:
    return Call(call_id=bytes(16), stage=1, step=step, index=0, accumulate=frozenset({0, 1}), inputs=TENSOR, labels=TENSOR, path=path or {})


def pair_of_peers(**fields: object) -> tuple[PeerRecord, ...]:
    """Two peers of stage 1 at step 3, and one of stage 0 who is the caller."""
    return (member("me", stage=0, step=3), member(A, stage=1, **{"step": 3, **fields}), member(B, stage=1, step=3))


@dataclass
class Sending:
    client: Client
    table: Table = field(default_factory=lambda: Table(pair_of_peers()))
    failures: list[PeerId] = field(default_factory=list)
    total_s: float = 5.0
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        client = cast(StageClient, self.client)
        self.dispatcher = Dispatcher(client, self.table, self, self, 2, 8, 1.0, lambda: self.total_s, _own_records=lambda: (OWN,))

    def report_failure(self, peer: PeerId) -> None:
        self.failures.append(peer)

    async def adapt(self, call: Call, _peer: PeerId) -> Call:
        return call

    async def send(self, wanted: Call | None = None) -> CallResult:
        return await self.dispatcher.send(wanted or call(), lambda _stage, _peer: None)


async def test_a_peer_that_takes_it_is_asked_once() -> None:
    sending = Sending(Client())
    assert (await sending.send()).gradient == TENSOR
    assert len(sending.client.asked) == 1
    assert sending.dispatcher.replayed == 0


async def test_of_the_records_in_a_reply_one_for_each_peer_on_the_way_is_taken() -> None:
    """A liar that adds more would make the peer that passes them on send more than its own caller takes."""
    sending = Sending(Client(records=tuple((bytes([number]), b"") for number in range(64))))
    assert (await sending.send()).records == sending.client.records[:1]
    sending.dispatcher._num_stages = 9
    assert (await sending.send()).records == sending.client.records[:8]


async def test_when_a_peer_is_gone_another_takes_it_and_the_first_is_told_to_forget_it() -> None:
    sending = Sending(Client({A: [PeerGoneError("gone")] * 9}))
    for _ in range(4):
        await sending.send()
    assert sending.client.asked == [A, B, B, B, B]
    assert sending.failures == [A]
    await asyncio.sleep(0)  # it is told in the background
    assert sending.client.cancelled == [A]
    assert sending.dispatcher.replayed == 1


async def test_hole_85_a_callee_that_refuses_gets_the_callers_record_with_the_next_call() -> None:
    """It may not know yet that the caller serves the stage before."""
    sending = Sending(Client({A: [WrongStateError("who are you?")] * 2}), Table(pair_of_peers()[:2]))
    for _ in range(2):
        await sending.send()
    assert sending.client.told == [(), (OWN,), (OWN,), ()]


async def test_hole_85_a_microbatch_goes_back_where_this_peer_is_left_out_of_its_stage() -> None:
    """Every callee would refuse it, and its caller would wait for nothing."""
    mates = (member(name, stage=0, step=3, sidelined=(PeerId("me"),)) for name in ("mate", "other"))
    sending = Sending(
        Client({A: [WrongStateError("left out")] * 9, B: [WrongStateError("left out")] * 9}), Table((*pair_of_peers(), *mates))
    )
    with pytest.raises(WrongStateError, match="left out of its stage"):
        await sending.send()
    assert len(sending.client.asked) == 1


async def test_a_call_that_nobody_took_is_not_one_to_do_again() -> None:
    sending = Sending(Client({A: [UnheardError("nobody there")]}))
    await sending.send()
    assert sending.client.asked == [A, B]
    assert sending.failures == [A]
    assert sending.dispatcher.replayed == 0


@pytest.mark.parametrize(
    ("error", "goes_on", "again"),
    [
        (PeerGoneError("gone"), False, True),
        (UnheardError("nobody there"), False, False),
        (BusyError("all slots are taken"), False, False),
        (WrongStateError("I am at step 2"), False, False),
        (WrongStateError("parameters that changed"), True, True),
    ],
)
async def test_the_next_peer_hears_of_it_where_the_first_or_one_behind_it_may_have_added_the_microbatch(
    error: RemoteError, goes_on: bool, again: bool
) -> None:
    sending = Sending(Client({A: [error]}, goes_on=goes_on))
    await sending.send()
    assert sending.client.again == [False, again]


async def test_a_banned_peer_is_tried_again_when_it_has_announced_itself_anew() -> None:
    sending = Sending(Client({A: [PeerGoneError("gone")]}))
    await sending.send()
    sending.table.records = pair_of_peers(version=1)[:2]
    await sending.send()
    assert sending.client.asked == [A, B, A]


@pytest.mark.parametrize(
    "error", [BusyError("all slots are taken"), WrongStateError("this peer is leaving"), WrongStateError("this peer is at step 2")]
)
async def test_a_peer_that_only_cannot_just_now_is_neither_banned_nor_re_dialled(error: RemoteError) -> None:
    sending = Sending(Client({A: [error]}))
    await sending.send()
    assert sending.client.asked == [A, B]
    sending.table.records = sending.table.records[:2]
    await sending.send()
    assert sending.client.asked == [A, B, A]
    assert sending.failures == []
    assert sending.client.cancelled == []
    assert sending.dispatcher.replayed == 0


@pytest.mark.parametrize(("step", "next_ledger_no"), [(3, 0), (4, 2)], ids=["of the step begun", "of the step after, where they overlap"])
async def test_a_peer_that_has_yet_to_commit_gets_its_share_of_the_step_all_the_same(
    step: int, next_ledger_no: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first of a stage to begin a step gets all that is launched at its beginning."""
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=lambda: 0.0))  # both answer equally fast, however busy the machine
    late = pair_of_peers(step=2, phase=Phase.AVERAGED, done=FULL)
    sending = Sending(Client(), Table(tuple(replace(record, next_ledger_no=next_ledger_no) for record in late)))
    for index in range(8):
        await sending.send(replace(call(step), index=index))
    assert sorted(sending.client.asked) == [A] * 4 + [B] * 4


async def test_for_a_gradient_alone_whoever_holds_the_microbatch_is_asked_and_else_anybody() -> None:
    for lacking, holder, expected in (({0}, A, [A] * 8), ({0}, B, [B] * 8), ({0, 1}, A, [A, B])):
        records = tuple(replace(record, done=0b11111111 if record.peer == holder else 0) for record in pair_of_peers())
        sending = Sending(Client(), Table(records))
        for index in range(8):
            await sending.send(replace(call(), index=index, accumulate=frozenset(lacking)))
        assert sorted(set(sending.client.asked)) == sorted(set(expected))


@pytest.mark.parametrize(("lacking", "measures"), [({0, 1}, True), ({1}, True), ({0}, False), ({2}, False)])
async def test_only_a_whole_microbatch_tells_how_fast_a_peer_is(lacking: set[int], measures: bool) -> None:
    """Not a forward pass alone, nor a gradient that may have been known."""
    sending = Sending(Client())
    wanted = replace(call(), accumulate=frozenset(lacking))
    await sending.send(wanted)
    assert bool(sending.dispatcher._router(wanted)._measured) == measures


@pytest.mark.parametrize("error", [PeerGoneError("gone"), BusyError("all slots are taken"), WrongStateError("this peer is leaving")])
async def test_a_holder_that_does_not_take_it_is_passed_by(error: RemoteError) -> None:
    """Anybody else can compute it."""
    asked_next = []
    for index in range(8):
        records = tuple(replace(record, done=0b11111111 if record.peer == A else 0) for record in pair_of_peers())
        sending = Sending(Client({A: [error]}), Table(records))
        await sending.send(replace(call(), index=index, accumulate=frozenset({0})))
        assert sending.client.asked[0] == A
        asked_next.append(sending.client.asked[1])
        assert len(sending.client.asked) <= 3
    assert asked_next.count(B) >= 4


async def test_no_gradient_need_come_back_where_only_this_stage_or_a_later_one_lacks_the_microbatch() -> None:
    sending = Sending(Client(gradient=None))
    for lacking in ({1}, {2}):
        assert (await sending.send(replace(call(), accumulate=frozenset(lacking)))).gradient is None
    assert len(sending.client.asked) == 2
    sending.total_s = 0.2
    with pytest.raises(PeerGoneError, match="no peer of stage 1"):
        await sending.send(replace(call(), accumulate=frozenset({0, 2})))


async def test_a_peer_that_says_for_how_long_it_will_not_hear_me_is_left_alone_for_so_long() -> None:
    deaf = BusyError("the caller sent a broken message")
    deaf.retry_after_s = 60.0
    sending = Sending(Client({A: [deaf]}))
    for _ in range(4):
        await sending.send()
    assert sending.client.asked == [A, B, B, B, B]
    assert sending.failures == []


async def test_a_peer_that_will_not_hear_me_for_a_while_is_tried_again_afterwards_where_there_is_no_other() -> None:
    deaf = BusyError("the caller sent a broken message")
    deaf.retry_after_s = 0.1
    sending = Sending(Client({A: [deaf]}), Table(pair_of_peers()[:2]))
    await sending.send()
    assert sending.client.asked == [A, A]


async def test_a_peer_that_finds_the_message_broken_is_left_alone_but_lives() -> None:
    sending = Sending(Client({A: [BadMessageError("what is this")] * 9}))
    await sending.send()
    assert sending.client.asked == [A, B]
    assert sending.failures == []


@pytest.mark.parametrize("kind", [NotFiniteError, ChangedLabelsError])
async def test_a_peer_that_refuses_a_microbatch_without_blame_is_not_at_fault_and_no_other_is_asked(kind: type[BlamelessError]) -> None:
    """Its values are not finite, or its labels are not those of the run's data."""
    sending = Sending(Client({A: [kind("refused")], B: [kind("refused")]}))
    with pytest.raises(kind):
        await sending.send()
    asked = [*sending.client.asked]
    assert len(asked) == 1
    assert (sending.failures, sending.client.cancelled, sending.dispatcher.replayed) == ([], [], 0)
    await sending.send()
    assert sending.client.asked == asked * 2, "it is not banned"


async def test_a_retry_prefers_the_peer_that_has_had_the_microbatch() -> None:
    sending = Sending(Client())
    await sending.send(call(path={1: B}))
    assert sending.client.asked == [B]


async def test_what_was_forwarded_where_is_passed_on_to_the_next_peer() -> None:
    sending = Sending(Client({A: [PeerGoneError("gone")]}))
    await sending.send()
    assert sending.client.paths[1] == {1: B, 2: PeerId("later")}


async def test_peers_that_are_leaving_or_at_another_step_come_last() -> None:
    for first in (pair_of_peers(leaving=True), pair_of_peers(step=4), pair_of_peers(step=2)):
        sending = Sending(Client(), Table(first))
        for _ in range(3):
            await sending.send()
        assert sending.client.asked == [B, B, B]


async def test_a_step_that_every_stage_has_left_is_not_worth_sending() -> None:
    records = (member("me", stage=0, step=5), member(A, stage=1, step=5))
    sending = Sending(Client(), Table(records))
    with pytest.raises(WrongStateError, match="step 3 is over"):
        await sending.send()
    assert sending.client.asked == []


async def test_patience_ends_when_nobody_serves_the_stage() -> None:
    sending = Sending(Client(), Table((member("me", stage=0, step=3),)), total_s=0.1)
    with pytest.raises(PeerGoneError, match="within"):
        await sending.send()


async def test_a_stage_that_is_full_or_takes_long_does_not_end_patience() -> None:
    """A minute a microbatch: slots stay full, and a callee works, for longer than nobody may take it."""
    busy = Sending(Client({A: [BusyError("full")] * 9}), Table(pair_of_peers()[:2]), total_s=0.5)
    began_s = time.monotonic()
    await busy.send()
    assert time.monotonic() - began_s > 2 * 0.5
    dies = Sending(Client({A: [PeerGoneError("died")]}, works_s=0.6), total_s=0.5)
    await dies.send()
    assert dies.client.asked == [A, B]


async def test_the_time_that_peers_work_before_they_turn_out_to_be_elsewhere_does_not_end_patience() -> None:
    """A pass of minutes, say, whose parameters are another step's when it is to go back."""
    client = Client({A: [WrongStateError("the parameters have changed")] * 4}, works_s=0.1)
    changed = Sending(client, Table(pair_of_peers()[:2]), total_s=0.3)
    await changed.send()
    assert client.asked == [A] * 5


async def test_an_evaluation_asks_each_peer_that_may_hold_the_parameters_once_and_then_gives_up() -> None:
    refusals: list[RemoteError] = [WrongStateError("this peer does not hold the parameters")] * 3
    records = (
        member(A, stage=1, step=4),
        member(B, stage=1, step=3),
        member("c", stage=1, step=2),
        member("d", stage=1, step=3, leaving=True),
    )
    sending = Sending(Client({A: [*refusals], B: [*refusals]}), Table(records))
    with pytest.raises(WrongStateError, match="no peer of stage 1 holds the parameters of step 3 any more"):
        await sending.send(replace(call(), evaluation=True))
    assert sending.client.asked == [B, A], "those at the step first"


async def test_an_evaluation_is_sent_again_after_its_step_is_over_and_a_loss_that_is_none_is_not_taken() -> None:
    sending = Sending(Client(losses={A: math.nan, B: 1.5}), Table(pair_of_peers(step=4)))
    sending.table.records = (member("me", stage=0, step=9), member(A, stage=1, step=9), member(B, stage=1, step=9))
    assert (await sending.send(replace(call(), evaluation=True))).loss == 1.5
    assert sending.client.asked[-1] == B
