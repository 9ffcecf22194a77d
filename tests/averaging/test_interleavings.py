"""Whatever meets the joining of a round, in any order: a member's state and its tasks know of one round, or of none.

A member is asked to join a round. Meanwhile the call of its leader ends, the leader asks again, proposes another round or aborts, the
member closes a round that no task of its runs (rule 4 (close)), it takes a new incarnation (T3 (fence)), or all sums arrive. Its thread
does one job after the other, and its event loop hears of that later; between any two of these moments anything else may happen. All orders
are tried.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from peerd.averaging.open_round import OpenRound
from peerd.averaging.rounds import Rounds
from peerd.config.manifest import ModelConfig
from peerd.errors import PeerGoneError
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Executor, Priority
from peerd.table.record import PeerId
from tests.averaging.rounds_group import MANIFEST, Group, Member

NOBODY = PeerId("")
SMALL = ModelConfig(num_layers=1, d_model=4, num_heads=1, d_ff=4, vocab_size=16)
ITERATIONS = 8
"""Of the event loop, until it has nothing to do but to wait."""


class JobByJob(Executor):
    """Does a job when it is told to, and hands the result over when it is told to. Jobs keep their order, as on a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._results: deque[tuple[Any, asyncio.Future[Any]]] = deque()

    async def run(self, priority: Priority, work: Callable[[], Any], step: int = 0) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        return await future

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def work(self) -> Iterator[None]:
        """Do all jobs. Yields after each."""
        while self._waiting:
            work, future = self._waiting.popleft()
            self._results.append((work(), future))
            yield

    def tell(self) -> None:
        """Hand the first result over."""
        result, future = self._results.popleft()
        if not future.done():
            future.set_result(result)


@dataclass
class Joining:
    """A member that was asked to join `first`. `other` is another round of the same leader."""

    member: Member
    jobs: JobByJob
    first: Roster
    other: Roster
    calls: list[asyncio.Future[Any]] = field(default_factory=list)
    is_aborted: bool = False

    @property
    def noted(self) -> OpenRound | None:
        return self.member.rounds.open

    # What happens

    def ask(self, roster: Roster) -> None:
        self.calls.append(asyncio.ensure_future(self.member.rounds.propose(roster.leader, roster)))

    def end_call(self) -> None:
        self.calls[0].cancel()

    def ask_again(self) -> None:
        self.ask(self.first)

    def ask_other(self) -> None:
        self.ask(self.other)

    def abort(self) -> None:
        self.is_aborted = True
        self.member.rounds.abort(self.first.leader, self.first.average_id, NOBODY, "")

    def look(self) -> None:
        """As the stepper does."""
        self.calls.append(asyncio.ensure_future(self.member.rounds.close_present("nothing at this peer would end the round")))

    def fence(self) -> None:
        """As the stepper does."""

        async def fenced() -> None:
            state = self.member.state
            await self.jobs.run(Priority.LEDGER, lambda: state.fence(state.record.incarnation + 1))
            await self.member.rounds.close_present("fenced")

        self.calls.append(asyncio.ensure_future(fenced()))

    def sums_come(self) -> None:
        assert self.noted is not None
        self.noted.exchange.done.set()

    def work(self) -> None:
        """The thread does what waits. An average is only taken from the round that the state is in."""
        state = self.member.state
        before, had_average = state.round, state.average is not None
        for _ in self.jobs.work():
            if state.average is not None and not had_average:
                assert state.average.roster is before
            before, had_average = state.round, state.average is not None

    def hear(self) -> None:
        self.jobs.tell()

    def can(self, event: str) -> bool:
        """Whether an event changes anything now. An order in which it does not is as good as a shorter one."""
        state = self.member.state
        match event:
            case "the thread works":
                return self.jobs.has_work
            case "the loop hears of it":
                return self.jobs.has_results
            case "the leader's call ends":
                return not self.calls[0].done()
            case "the member looks":
                return state.round is not None and not self.member.rounds.runs(state.round.average_id)
            case "all sums are here":
                return self.noted is not None and not self.noted.exchange.done.is_set()
        return True

    # What holds

    async def go_on(self) -> None:
        """Let the event loop do what it can. A round is noted only while the state is in it."""
        before = self.noted
        for _ in range(ITERATIONS):
            await asyncio.sleep(0)
        assert self.noted in (None, before) or self.noted.roster is self.member.state.round

    async def settle(self) -> None:
        """Until there is nothing left to do but to wait for others."""
        await self.go_on()
        while self.jobs.has_work or self.jobs.has_results:
            self.work()
            self.hear()
            await self.go_on()

    def check(self) -> None:
        state, rounds = self.member.state, self.member.rounds
        assert state.round is (None if rounds.open is None else rounds.open.roster)
        assert state.round is None or rounds.runs(state.round.average_id)
        assert not (self.is_aborted and state.round is self.first)
        for call in self.calls:
            assert call.cancelled() or call.exception() is None


EVENTS: dict[str, Callable[[Joining], None]] = {
    "the leader's call ends": Joining.end_call,
    "it asks again": Joining.ask_again,
    "it asks for another round": Joining.ask_other,
    "it aborts": Joining.abort,
    "the member looks": Joining.look,
    "the member fences": Joining.fence,
    "all sums are here": Joining.sums_come,
}
TURNS: dict[str, Callable[[Joining], None]] = {"the thread works": Joining.work, "the loop hears of it": Joining.hear}


class Orders:
    """Tries orders at a member of a round of two. Nothing that it says arrives."""

    def __init__(self, group: Group) -> None:
        async def fault(*_: object) -> None:
            raise PeerGoneError("gone")

        group.fault = fault
        self._member, self._record = group.members[PeerId("member1")], group.members[PeerId("member1")].state.record
        self._rosters = group.roster(leader=PeerId("member0")), group.roster(attempt=1, leader=PeerId("member0"))

    def _asked(self) -> Joining:
        """The member as it was before anything happened, and the call of its leader."""
        member, state, jobs = self._member, self._member.state, JobByJob()
        state.record, state.round, state.average = self._record, None, None
        before = member.rounds
        rounds = Rounds(state, jobs, before._around.client, before.kept._log, before._averaging_s, before._clock, member.host)
        joining = Joining(replace(member, rounds=rounds, executor=jobs), jobs, *self._rosters)
        joining.ask(joining.first)
        return joining

    async def play(self, order: Sequence[str]) -> list[str]:
        """Let this happen, and then nothing more. Returns what else could have happened then."""
        joining = self._asked()
        try:
            await joining.go_on()
            for event in order:
                (EVENTS | TURNS)[event](joining)
                await joining.go_on()
            possible = [event for event in EVENTS | TURNS if joining.can(event)]
            await joining.settle()
            joining.check()
            return possible
        except AssertionError as error:
            raise AssertionError(", ".join(order)) from error
        finally:
            joining.member.rounds.shut()
            joining.jobs.close()

    async def explore(self, most: int, order: tuple[str, ...] = ()) -> int:
        """Try all orders that begin so, of up to so many events besides the turns of thread and loop. Returns their number."""
        possible = await self.play(order)
        if sum(event in EVENTS for event in order) == most:
            return 1
        later = [event for event in possible if event in TURNS or event not in order]
        return 1 + sum([await self.explore(most, (*order, event)) for event in later])


LONG = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("num_events", [2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)])
async def test_hole_21_a_member_that_joins_a_round_is_in_it_or_in_none_whatever_comes_between(
    make_group: Callable[..., Group], num_events: int
) -> None:
    group = make_group(2, replace(MANIFEST, model=SMALL), averaging_s=1e6)
    with capture_logs():
        assert await Orders(group).explore(num_events) > 10**num_events
