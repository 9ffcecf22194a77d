"""A caller whose calls change nothing gets its answers later and later, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from secrets import token_bytes

import pytest

from peerd.errors import BusyError, RemoteError
from peerd.policy.step.roster import Roster, entry_of
from peerd.table.record import AverageId, PeerId, PeerRecord, RunId
from peerd.wire import budgets
from peerd.wire.budgets import BURST_S, MOST_DELAY_S, MOST_PUT_OFF, USELESS_A_SECOND, UselessCalls, allowance_of
from peerd.wire.clients import AveragingClient, StageClient
from peerd.wire.swarm_client import SwarmClient
from tests.wire.callee import MANIFEST, PATIENCE_S, RUN, Callee, new_identity

ONE, OTHER = PeerId("one"), PeerId("other")
SLOTS = 8
A_SECOND = USELESS_A_SECOND * allowance_of("Backpropagate").most_calls(SLOTS)


def delays(calls: UselessCalls, caller: PeerId, number: int, every_s: float, slots: int = SLOTS, from_s: float = 0.0) -> list[float]:
    return [calls.delay_s(caller, slots, from_s + each * every_s) for each in range(number)]


def test_what_an_honest_caller_is_refused_at_once_or_for_ever_is_answered_at_once() -> None:
    """A burst for each microbatch that it may have open, and from then on as many as full slots refuse."""
    calls = UselessCalls()
    assert not any(delays(calls, ONE, int(BURST_S * A_SECOND) - 1, 0.0))
    assert not any(delays(calls, ONE, 1000, 1 / A_SECOND, from_s=2 / A_SECOND))


@pytest.mark.parametrize("slots", [1, SLOTS, 512])
def test_the_answers_to_a_caller_without_a_pause_wait_so_that_it_keeps_the_rate_and_a_second_at_most(slots: int) -> None:
    calls, a_second = UselessCalls(), USELESS_A_SECOND * allowance_of("Backpropagate").most_calls(slots)
    now_s, number = 0.0, 0
    while now_s < 60:  # each call after the answer to the last
        now_s += calls.delay_s(ONE, slots, now_s) + 1e-5
        number += 1
    assert number == pytest.approx((60 + BURST_S) * a_second, rel=0.01)
    found = delays(calls, ONE, 10 * a_second, 0.0, slots, from_s=now_s)
    assert max(found) == pytest.approx(MOST_DELAY_S)
    assert calls.delay_s(OTHER, slots, now_s) == 0


def test_all_strangers_share_one_bucket_and_members_have_their_own() -> None:
    calls = UselessCalls({ONE}.__contains__)
    found = [calls.delay_s(PeerId(f"key{number}"), SLOTS, 0.0) for number in range(int(10 * A_SECOND))]
    assert found[-1] == MOST_DELAY_S
    assert calls.delay_s(ONE, SLOTS, 0.0) == 0
    assert calls.num_callers == 2


def test_nothing_stays_of_a_caller_that_has_been_calm() -> None:
    calls = UselessCalls()
    for number in range(1000):
        calls.delay_s(PeerId(f"peer{number}"), SLOTS, 0.1 * number)
    assert calls.num_callers <= 2


@pytest.fixture
def calmer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No burst, so that a test shows the rest."""
    monkeypatch.setattr(budgets, "BURST_S", 0.0)


async def flooded(call: Callable[[], Awaitable[object]], at_once: int, for_s: float) -> int:
    """Make calls without a pause for a while. Returns how many were answered or refused."""
    until_s, number = time.monotonic() + for_s, 0

    async def on_and_on() -> None:
        nonlocal number
        while time.monotonic() < until_s:
            with contextlib.suppress(RemoteError):
                await call()
            number += 1

    await asyncio.gather(*(on_and_on() for _ in range(at_once)))
    return number


FOR_S, AT_ONCE = 1.5, 4


@pytest.mark.usefixtures("calmer")
@pytest.mark.parametrize("kind", ["cancel", "abort", "propose", "another run"])
async def test_a_flood_of_calls_that_change_nothing_slows_down_and_nobody_else(callee: Callee, kind: str) -> None:
    stage, averaging = StageClient(callee.links(), RUN), AveragingClient(callee.links(), RUN)
    mine = PeerRecord(peer=callee.caller.peer, incarnation=1, stage=1)
    roster, me = Roster(1, 0, 0, mine.peer, (entry_of(mine),)), callee.me
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "cancel": lambda: stage.cancel(me, token_bytes(16), PATIENCE_S),
        "abort": lambda: averaging.abort(me, AverageId(token_bytes(16)), "", "", PATIENCE_S),
        "propose": lambda: averaging.propose(me, roster, PATIENCE_S),
        "another run": lambda: SwarmClient(callee.links(), RunId("b" * 32)).gossip(me, [], PATIENCE_S),
    }
    flood = asyncio.ensure_future(flooded(calls[kind], AT_ONCE, FOR_S))
    await asyncio.sleep(FOR_S / 2)
    began_s = time.monotonic()
    await StageClient(callee.links(new_identity()), RUN).cancel(me, token_bytes(16), PATIENCE_S)
    await callee.assert_lives()
    assert time.monotonic() - began_s < MOST_DELAY_S
    a_second = USELESS_A_SECOND * allowance_of("Backpropagate").most_calls(MANIFEST.slots)
    assert await flood <= (FOR_S + MOST_DELAY_S) * a_second + AT_ONCE
    assert (callee.door.calls.total, callee.door.put_off.num_callers) == (0, 0)


@pytest.mark.usefixtures("calmer")
async def test_refusals_for_too_many_calls_and_of_a_banned_caller_wait_too_and_few_do(callee: Callee) -> None:
    client, asked_s = SwarmClient(callee.links(), RUN), time.monotonic()
    callee.door.bans.add(callee.caller.peer, 600.0)
    for _ in range(1000):
        callee.door.useless.delay_s(callee.caller.peer, MANIFEST.slots, time.monotonic())
    asked = [asyncio.ensure_future(client.gossip(callee.me, [], PATIENCE_S)) for _ in range(2 * MOST_PUT_OFF)]
    done, waiting = await asyncio.wait(asked, timeout=MOST_DELAY_S / 2)
    assert (len(done), len(waiting)) == (MOST_PUT_OFF, MOST_PUT_OFF)
    for each in asked:
        with pytest.raises(BusyError, match="sent a broken message"):
            await each
    assert time.monotonic() - asked_s >= MOST_DELAY_S
    assert callee.door.put_off.num_callers == 0
