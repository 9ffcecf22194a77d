"""The trainer launches again what failed, logs that once, and takes over the work of a slow trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from peerd.errors import ChangedLabelsError, NotFiniteError, PeerGoneError, RemoteError
from peerd.policy.route.diverging import TRIES
from peerd.policy.route.launching import AT_FIRST, Work, first_owned, window
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.train import trainer
from peerd.train.samples import Microbatches
from peerd.train.trainer import Trainer
from peerd.wire.bans import Bans
from peerd.wire.dispatch import Dispatcher
from peerd.wire.messages import Call, CallResult
from tests.strategies import member, view_of
from tests.tiny_run import tiny_manifest

MANIFEST = tiny_manifest(2)
STEPS = 2
MANY = 16
"""Microbatches of a step, more than are ever in flight here."""
AVERAGED: dict[str, object] = {"phase": Phase.AVERAGED, "done": 2**MANY - 1}


@dataclass
class Noise:
    read: list[tuple[int, int]] = field(default_factory=list)

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        self.read.append((step, index))
        return torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64)


@dataclass
class Swarm:
    """Two stages of one peer each. The first launch of each microbatch fails; the second is accumulated by the stages it names."""

    bans: ClassVar[Bans] = Bans()
    records: list[PeerRecord] = field(default_factory=lambda: [member("me", trains=True), member("b", stage=1)])
    seen: Counter[tuple[int, int]] = field(default_factory=Counter)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def live(self) -> LiveView:
        return view_of(*self.records)

    async def changed(self, _timeout_s: float) -> bool:
        await asyncio.sleep(0.001)
        return True

    def wake(self) -> None: ...

    async def send(self, call: Call, _on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        self.seen[call.step, call.index] += 1
        if self.seen[call.step, call.index] == 1:
            raise PeerGoneError("gone")
        self.records = [replace(record, done=record.done | (1 << call.index)) for record in self.records]
        if all(record.done == (1 << MANIFEST.train.microbatches_per_step) - 1 for record in self.records):
            self.records = [replace(record, step=record.step + 1, done=0) for record in self.records]
            if self.records[0].step == STEPS:
                self.is_over.set()
        return CallResult(gradient=None, downstream_s=0.0, records=())


async def test_what_is_launched_again_is_told_once_for_each_step_and_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "FAILURE_PAUSE_S", 0.0)
    swarm, number = Swarm(), MANIFEST.train.microbatches_per_step
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    with capture_logs() as logs:
        running = asyncio.ensure_future(made.run())
        async with asyncio.timeout(20):
            await swarm.is_over.wait()
        running.cancel()
        await asyncio.wait({running})
    told = [(log["step"], log["stage"], log["count"]) for log in logs if log["event"] == "microbatches launched again"]
    assert told[: 2 * STEPS] == [(step, stage, number) for step in range(STEPS) for stage in (0, 1)]
    assert made.replayed == sum(count for _, stage, count in told if stage == 0)


@dataclass
class Silent:
    """Another trainer beside this one that launches nothing. The test sets the clock."""

    bans: ClassVar[Bans] = Bans()
    now_s: float = 1000.0
    tick_s: float = 0.2
    launched: set[int] = field(default_factory=set)
    looks_left: int = 0
    has_looked: asyncio.Event = field(default_factory=asyncio.Event)

    def live(self) -> LiveView:
        return view_of(member("me", trains=True), member("second", trains=True), member("b", stage=1))

    async def changed(self, _timeout_s: float) -> bool:
        self.now_s += self.tick_s
        self.looks_left -= 1
        if self.looks_left == 0:
            self.has_looked.set()
        await asyncio.sleep(0.001)
        return False

    def wake(self) -> None: ...

    async def send(self, call: Call, _on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        self.launched.add(call.index)
        await asyncio.sleep(0.001)
        return CallResult(gradient=None, downstream_s=0.0, records=())

    async def look(self, times: int) -> set[int]:
        """The microbatches launched after the trainer has looked so many more times."""
        self.looks_left, self.has_looked = times, asyncio.Event()
        async with asyncio.timeout(20):
            await self.has_looked.wait()
        return set(self.launched)


@dataclass
class Spoilt(Silent):
    """The only trainer of a run whose parameters are spoilt."""

    sent: list[float] = field(default_factory=list)
    error: RemoteError = field(default_factory=lambda: NotFiniteError("the loss is not finite"))

    def live(self) -> LiveView:
        return view_of(member("me", trains=True), member("b", stage=1))

    async def send(self, call: Call, _on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        self.sent.append(self.now_s)
        await asyncio.sleep(0)
        raise self.error


async def test_a_run_that_diverged_is_told_once_and_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, number = Spoilt(), MANIFEST.train.microbatches_per_step
    monkeypatch.setattr(trainer, "clock_s", lambda: swarm.now_s)
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    began_s = swarm.now_s
    with capture_logs() as logs:
        running = asyncio.ensure_future(made.run())
        await swarm.look(500)  # a hundred seconds
        running.cancel()
        await asyncio.wait({running})
    assert made.diverged_at == 0
    assert [log["step"] for log in logs if log["event"] == "diverged"] == [0]
    assert len(swarm.sent) <= 8 * number
    assert sum(sent_s > began_s + 40 for sent_s in swarm.sent) <= number


async def test_microbatches_whose_labels_were_changed_on_the_way_are_no_sign_that_the_run_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go another way soon, and the others of the step are launched meanwhile."""
    swarm, number = Spoilt(error=ChangedLabelsError("the labels are not those of the run's data")), MANIFEST.train.microbatches_per_step
    monkeypatch.setattr(trainer, "clock_s", lambda: swarm.now_s)
    monkeypatch.setattr(trainer, "FAILURE_PAUSE_S", 0.0)
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    with capture_logs() as logs:
        running = asyncio.ensure_future(made.run())
        await swarm.look(100)
        running.cancel()
        await asyncio.wait({running})
    assert len(swarm.sent) > 3 * TRIES * number
    assert made.diverged_at is None
    assert not [log for log in logs if log["event"] == "diverged"]


async def test_who_slept_does_not_take_the_others_for_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Silent()
    monkeypatch.setattr(trainer, "clock_s", lambda: swarm.now_s)
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    running = asyncio.ensure_future(made.run())
    mine = await swarm.look(5)
    assert 0 < len(mine) < MANIFEST.train.microbatches_per_step
    swarm.tick_s = 10 * trainer.FIRST_TAKEOVER_S
    assert await swarm.look(3) == mine
    swarm.tick_s = 0.2
    assert await swarm.look(int(trainer.FIRST_TAKEOVER_S / 0.2) - 10) == mine
    assert await swarm.look(30) == set(range(MANIFEST.train.microbatches_per_step))
    running.cancel()
    await asyncio.wait({running})


async def test_where_my_own_microbatches_take_long_others_are_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a step is not known yet, and each microbatch takes minutes: nothing failed, so nothing is launched twice."""
    swarm, done = Silent(tick_s=1.0), asyncio.Event()

    async def send(call: Call, _on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        swarm.launched.add(call.index)
        await done.wait()
        return CallResult(gradient=None, downstream_s=0.0, records=())

    monkeypatch.setattr(swarm, "send", send)
    monkeypatch.setattr(trainer, "clock_s", lambda: swarm.now_s)
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    running = asyncio.ensure_future(made.run())
    mine = await swarm.look(5)
    assert 0 < len(mine) < MANIFEST.train.microbatches_per_step
    assert await swarm.look(300) == mine
    done.set()
    assert await swarm.look(int(trainer.FIRST_TAKEOVER_S) + 5) == set(range(MANIFEST.train.microbatches_per_step)), "now they are late"
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize("throughput", [0.0, 0.01])
async def test_a_trainer_whose_own_are_done_waits_for_others_as_long_as_peers_say_that_one_takes(
    throughput: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step has ended yet, and this trainer has nothing under way. Two samples at a hundredth a second take 200 s."""
    swarm = Silent(tick_s=1.0)
    records = member("me", trains=True), member("second", trains=True), member("b", stage=1, throughput=throughput)
    monkeypatch.setattr(swarm, "live", lambda: view_of(*records))
    monkeypatch.setattr(trainer, "clock_s", lambda: swarm.now_s)
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    running = asyncio.ensure_future(made.run())
    mine, everything = await swarm.look(12), set(range(MANIFEST.train.microbatches_per_step))
    assert 0 < len(mine) < len(everything)
    microbatch_s = MANIFEST.train.microbatch_size / throughput if throughput else 0.0
    assert await swarm.look(max(1, int(2 * microbatch_s) - 20)) == mine, "a peer that computes its first says so only after a while"
    assert await swarm.look(40) == everything
    running.cancel()
    await asyncio.wait({running})


async def test_once_all_that_is_mine_is_launched_the_next_steps_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, noise = Silent(), Noise()
    monkeypatch.setattr(trainer, "clock_s", lambda: swarm.now_s)
    made = Trainer(MANIFEST, cast(Microbatches, noise), cast(Membership, swarm), cast(Dispatcher, swarm))
    running = asyncio.ensure_future(made.run())
    mine = await swarm.look(20)
    assert set(noise.read) >= {(0, index) for index in mine}
    ahead = [index for step, index in noise.read if step == 1]
    assert ahead == first_owned(swarm.live(), 1, MANIFEST.train.microbatches_per_step) != []
    running.cancel()
    await asyncio.wait({running})


@dataclass
class Noisy(Silent):
    """The same while the other's ledger grows all the time, so that there is news at every look."""

    done: int = 0

    def live(self) -> LiveView:
        return view_of(member("me", trains=True), member("other", trains=True, done=self.done), member("b", stage=1))

    async def changed(self, timeout_s: float) -> bool:
        await super().changed(timeout_s)
        self.done = (self.done + 1) % (1 << MANIFEST.train.microbatches_per_step)
        return True

    async def send(self, call: Call, _on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        self.launched.add(call.index)
        await asyncio.Event().wait()
        raise AssertionError


async def test_that_a_ledger_grows_makes_nobody_look_for_work_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, looks = Noisy(tick_s=trainer.TICK_S / 50), list[float]()
    monkeypatch.setattr(trainer, "clock_s", lambda: swarm.now_s)
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    work = made._work

    def look(live: LiveView, now_s: float) -> Work:
        looks.append(now_s)
        return work(live, now_s)

    monkeypatch.setattr(made, "_work", look)
    running = asyncio.ensure_future(made.run())
    await swarm.look(100)
    looks.clear()
    await swarm.look(500)
    assert 9 <= len(looks) <= 11  # once every tick
    running.cancel()
    await asyncio.wait({running})


@dataclass
class Fading:
    """Another trainer that expires once the table has been read so many times. Time stands still, and there is always news."""

    bans: ClassVar[Bans] = Bans()
    looks_left: int
    missing: set[int] = field(default_factory=lambda: set(range(MANIFEST.train.microbatches_per_step)))
    launched_all: asyncio.Event = field(default_factory=asyncio.Event)

    def live(self) -> LiveView:
        self.looks_left -= 1
        there = [member("other", trains=True)] if self.looks_left >= 0 else []
        return view_of(member("me", trains=True), *there, member("b", stage=1))

    async def changed(self, _timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return True

    def wake(self) -> None: ...

    async def send(self, call: Call, _on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        self.missing.discard(call.index)
        if not self.missing:
            self.launched_all.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("looks", range(1, 13))
async def test_whenever_another_falls_silent_its_share_is_taken_over(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Fading(looks)
    monkeypatch.setattr(trainer, "clock_s", lambda: 1000.0)
    monkeypatch.setattr(trainer, "window", lambda *_: 10 * MANIFEST.train.microbatches_per_step)
    made = Trainer(MANIFEST, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    running = asyncio.ensure_future(made.run())
    async with asyncio.timeout(5):
        await swarm.launched_all.wait()
    running.cancel()
    await asyncio.wait({running})


@dataclass
class Committing:
    """One peer per stage, which has averaged step 0, and one trainer; no launched microbatch returns."""

    bans: ClassVar[Bans] = Bans()
    records: list[PeerRecord] = field(default_factory=lambda: [member("me", trains=True, **AVERAGED), member("b", stage=1, **AVERAGED)])
    launched: list[tuple[int, int]] = field(default_factory=list)
    passed_on: Callable[[int, PeerId], None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    looks: int = 0

    def live(self) -> LiveView:
        return view_of(*self.records)

    async def changed(self, _timeout_s: float) -> bool:
        self.looks += 1
        await self.news.wait()
        self.news.clear()
        return True

    def wake(self) -> None:
        self.news.set()

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        self.launched.append((call.step, call.index))
        on_forwarded(0, PeerId("me"))
        self.passed_on = on_forwarded
        await asyncio.Event().wait()
        raise AssertionError

    async def look(self) -> int:
        """The number of launches after the trainer has seen all news."""
        before = -1
        async with asyncio.timeout(20):
            while before != len(self.launched):
                before = len(self.launched)
                self.wake()
                for _ in range(20):
                    await asyncio.sleep(0.001)
        return before


@pytest.mark.parametrize("how", ["a microbatch is passed on", "its peer tells of the step"])
async def test_while_the_first_stage_commits_it_gets_what_keeps_it_busy_and_then_the_rest(how: str) -> None:
    swarm = Committing()
    manifest = tiny_manifest(2, microbatches_per_step=MANY)
    made = Trainer(manifest, cast(Microbatches, Noise()), cast(Membership, swarm), cast(Dispatcher, swarm))
    running = asyncio.ensure_future(made.run())
    assert await swarm.look() == AT_FIRST
    if how == "a microbatch is passed on":
        assert swarm.passed_on is not None
        swarm.passed_on(1, PeerId("b"))
    else:
        swarm.records = [replace(swarm.records[0], step=1, phase=Phase.ACCUMULATING, done=0), swarm.records[1]]
    assert await swarm.look() == window(swarm.live(), 2, manifest.slots) > AT_FIRST
    assert {step for step, _ in swarm.launched} == {1}
    running.cancel()
    await asyncio.wait({running})
