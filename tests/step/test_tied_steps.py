"""Whole steps with a weight that two stages hold: the real steppers, rounds and states of a small swarm in one process.

Peers see one table without delay and call one another directly; nothing else of them is made up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.errors import PeerGoneError, WrongStateError
from peerd.link.links import Bytes
from peerd.policy.step.acts import SkipStep
from peerd.policy.step.following import Followers
from peerd.policy.step.ledger import accumulate_set, indices, stages_missing
from peerd.policy.step.recovery import Beginning
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.policy.step.situation import StepRules
from peerd.reference import train_reference
from peerd.stage.download import Downloader
from peerd.stage.executor import Executor, Priority
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.stage.snapshots import SnapshotServer
from peerd.stage.state import StageState
from peerd.stage.state_bytes import most_state_bytes
from peerd.step.stepper import Stepper
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.train.corpus import Corpus
from peerd.wire.bans import Bans
from peerd.wire.chunk_streams import Offer
from peerd.wire.clients import AveragingClient
from peerd.wire.deliveries import Lending
from peerd.wire.messages import Average, Beat, Frame, ProposalAnswer, Snapshot, StateRequest, Verified
from peerd.wire.state_client import StateClient
from tests.paper_host import PaperHost
from tests.tiny_run import corpus_of, tiny_manifest
from tests.wire.lent import Lent

NUM_STAGES, NUM_MICROBATCHES, LONG_S = 3, 4, 600.0
MANIFEST = tiny_manifest(NUM_STAGES, microbatches_per_step=NUM_MICROBATCHES, accumulate="float64", max_gradient_norm=0.5)
MANIFEST = replace(MANIFEST, model=replace(MANIFEST.decoder, tie_word_embeddings=True))
RULES = StepRules(
    num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, ttl_s=LONG_S, averaging_s=LONG_S, shares_norms=True, ties_stages=True
)
WEIGHT = "embedding.weight"


@dataclass
class Table:
    """Every peer of the swarm, and what each of them sees."""

    folder: Path
    corpus: Corpus
    peers: dict[PeerId, Peer] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody's phase, step or ledger."""
    link_works: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing of a state arrives before."""

    def __post_init__(self) -> None:
        self.link_works.set()

    def live(self, me: PeerId) -> LiveView:
        return LiveView(me=me, records=tuple(self.peers[name].record for name in sorted(self.peers)))

    @property
    def anybody(self) -> LiveView:
        return self.live(min(self.peers))

    def enter(self, name: str, stage: int, serves: bool = True) -> Peer:
        peer = self.peers[PeerId(name)] = Peer(self, PeerId(name), stage)
        if serves:
            peer.state.serve()
        peer.task = asyncio.ensure_future(peer.stepper.run())
        return peer

    def kill(self, name: str) -> None:
        self.peers.pop(PeerId(name)).end()

    async def work(self, step: int, most: int = NUM_MICROBATCHES) -> None:
        """What trainers do: at most so many of the step's missing microbatches go through the stages."""
        wanted = stages_missing(self.anybody, NUM_STAGES, step, NUM_MICROBATCHES)
        absent = 0
        for bitmap in wanted.values():
            absent |= bitmap
        for index in [*indices(absent)][:most]:
            await self._microbatch(step, index, accumulate_set(wanted, index))

    async def _microbatch(self, step: int, index: int, accumulate: frozenset[int]) -> None:
        serving = [[self.peers[r.peer] for r in self.anybody.serving(s) if step in (r.step, r.step - 1)] for s in range(NUM_STAGES)]
        path = [able[index % len(able)] for able in serving]
        tokens, labels = self.corpus.microbatch(step, index)
        batches = []
        try:
            for peer in path:
                mark = (peer.state.record.incarnation, peer.state.record.ledger_no)
                ticket = Ticket(step, index, mark, peer.state.record.stage in accumulate)
                batches.append(HeldMicrobatch(ticket, tokens, labels))
                if peer is not path[-1]:
                    tokens = await peer.run(lambda peer=peer: forward(peer.state, batches[-1]))
            outcome = await path[-1].run(lambda: forward_backward(path[-1].state, batches[-1]))
            for peer, batch in zip(path[-2::-1], batches[-2::-1], strict=True):
                gradient = outcome.gradient
                outcome = await peer.run(lambda peer=peer, batch=batch, gradient=gradient: backward(peer.state, batch, gradient))
        except WrongStateError:
            return  # one of them has gone on meanwhile

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def finish(self, step: int, but: str = "") -> None:
        """Every peer `but` one has finished the step and serves."""

        def finished() -> bool:
            records = [peer.state.record for name, peer in self.peers.items() if name != but]
            return all(record.step > step and record.phase is not Phase.JOINING for record in records)

        while not finished():
            await self.work(step)
            if not finished():
                self.changed.clear()
                await self.changed.wait()


class Peer:
    """A stage's state with its stepper; also the membership, the clients and the links of its parts."""

    def __init__(self, table: Table, name: PeerId, stage: int) -> None:
        self._table = table
        self.me = name
        self.view = SimpleNamespace(sightings={})
        self.bans = Bans()
        self.state = StageState(MANIFEST, PeerRecord(peer=name, stage=stage), torch.device("cpu"), self.live)
        self.executor = Executor()
        log, client = AverageLog(table.folder / name, torch.float64), cast(AveragingClient, self)
        self.followers = Followers()
        host = PaperHost(table.changed, needed_from=self.needed_from)
        self.rounds = Rounds(self.state, self.executor, client, log, LONG_S, clock_s, host)
        self.snapshots = SnapshotServer(self.state, self.executor, self.followers, LONG_S)
        membership = cast(Membership, self)
        downloader = Downloader(cast(StateClient, self), membership, partial(most_state_bytes, MANIFEST), LONG_S)
        self.stepper = Stepper(self.state, self.executor, membership, self.rounds, downloader, RULES, Beginning(), host)
        self.task: asyncio.Future[None]

    def end(self) -> None:
        self.task.cancel()
        self.rounds.shut()
        self.executor.close()

    def needed_from(self) -> int | None:
        return self.followers.needed_from(self.live(), self.state.record, clock_s())

    @property
    def record(self) -> PeerRecord:
        return replace(self.state.record, kept_averages=self.rounds.kept.num_kept)

    async def run(self, work: Any) -> Any:
        return await self.executor.run(Priority.FORWARD, work)

    # as its membership

    is_quiet = False

    def live(self) -> LiveView:
        return self._table.live(self.me)

    async def changed(self, _timeout_s: float) -> None:
        await asyncio.sleep(0.005)

    def wake(self) -> None:
        """Nothing sleeps long here."""

    # as its clients

    def _at(self, peer: PeerId) -> Peer:
        if peer not in self._table.peers:
            raise PeerGoneError("it is gone")
        return self._table.peers[peer]

    async def propose(self, peer: PeerId, roster: Roster, _timeout_s: float) -> ProposalAnswer:
        return await self._at(peer).rounds.propose(self.me, roster)

    async def give(self, peer: PeerId, average_id: AverageId, frames: AsyncGenerator[Frame], told: Callable[[Verified], None]) -> None:
        await self._at(peer).rounds.give(self.me, average_id, lambda _size_of: frames, told)

    async def take(self, *_: object) -> None:
        raise AssertionError("everybody can call everybody")

    async def beat(self, peer: PeerId, beat: Beat, _timeout_s: float) -> Beat:
        return self._at(peer).rounds.beat(self.me, beat)

    async def abort(self, peer: PeerId, average_id: AverageId, left_out: PeerId, reason: str, _timeout_s: float) -> None:
        self._at(peer).rounds.abort(self.me, average_id, left_out, reason)

    @contextlib.asynccontextmanager
    async def open_average(
        self, peer: PeerId, stage: int, step: int, _section: int | None, patience_s: float
    ) -> AsyncIterator[Offer[Average]]:
        average, file, _ = await self._at(peer).rounds.kept.get_average(stage, step)
        with Lending(file, patience_s) as lending:
            yield Lent(average, lending)

    async def get_tied(self, peer: PeerId, step: int, wanted: AverageId, _num_bytes: int, _patience_s: float) -> tuple[Bytes, ...]:
        return tuple((await self._at(peer).rounds.kept.get_tied(step, wanted)).chunks())

    @contextlib.asynccontextmanager
    async def open(self, peer: PeerId, request: StateRequest, _patience_s: float) -> AsyncIterator[Offer[Snapshot]]:
        found, lending = await self._at(peer).snapshots.snapshot(self.me, request)
        with lending:
            yield LentState(found, lending, self._table)


class LentState(Lent[Snapshot]):
    """A stream on which a peer sends its state, while the link works."""

    def __init__(self, header: Snapshot, lending: Lending, table: Table) -> None:
        super().__init__(header, lending)
        self._table = table

    async def take(self, num_bytes: int) -> bytes:
        await self._table.link_works.wait()
        return await super().take(num_bytes)


@pytest.fixture
async def table(tmp_path: Path) -> AsyncIterator[Table]:
    torch.set_num_threads(1)
    table = Table(tmp_path, corpus_of(MANIFEST, tmp_path))
    for name, stage in (("a", 0), ("b", 0), ("m", 1), ("y", 2), ("z", 2)):
        table.enter(name, stage)
    yield table
    for peer in table.peers.values():
        peer.end()


def parameters_of(table: Table, stage: int) -> list[dict[str, Tensor]]:
    peers = [peer for peer in table.peers.values() if peer.state.record.stage == stage]
    return [{name: value.detach() for name, value in peer.state.holdings.module.named_parameters()} for peer in peers]


def assert_one_model(table: Table) -> None:
    """Peers of a stage are equal, and so are both stages' copies of the weight, with all that an update changes of it."""
    for stage in range(NUM_STAGES):
        first, *rest = parameters_of(table, stage)
        assert all(torch.equal(each[name], value) for each in rest for name, value in first.items())
    holders = [peer.state for peer in table.peers.values() if peer.state.holdings.tied_names]
    first, *rest = [{name: value.clone() for name, value in state.holdings.tied_tensors(state.record).items()} for state in holders]
    assert all(torch.equal(each[name], value) for each in rest for name, value in first.items())
    assert len({state.record.tied for state in holders}) == 1
    assert holders[0].record.tied != Lineage()


async def test_a_swarm_with_a_death_and_a_newcomer_trains_one_weight_as_one_machine_would(table: Table) -> None:
    await table.finish(0)
    assert_one_model(table)
    await table.work(1, most=2)
    table.kill("b")
    await table.finish(1)
    newcomer = table.enter("c", 0, serves=False)
    await table.finish(2)
    assert newcomer.stepper.reloads == 0, "it has applied the others' averages and sums"
    assert_one_model(table)
    expected = train_reference(MANIFEST, table.corpus, 3).parameters
    for stage in range(NUM_STAGES):
        assert all(torch.equal(expected[name], value) for name, value in parameters_of(table, stage)[0].items())


async def test_hole_28_a_joiner_whose_download_takes_many_steps_downloads_once_and_ends_as_its_donor(table: Table) -> None:
    """A stage with one peer: nobody else needs its averages meanwhile."""
    table.kill("b")
    for step in range(8):
        await table.finish(step)
    table.link_works.clear()
    newcomer = table.enter("c", 0, serves=False)
    for step in range(8, 16):
        await table.finish(step, but="c")
    assert newcomer.stepper.reloads == 1
    table.link_works.set()
    await table.finish(16)
    await table.finish(17)
    assert newcomer.stepper.reloads == 1
    assert_one_model(table)
    assert table.peers[PeerId("a")].needed_from() is None


async def test_who_was_asleep_finishes_the_step_with_the_sum_that_was_applied(table: Table) -> None:
    """b, in a round that a leads, averages and sleeps; the others finish the step without it; then it wakes."""
    await table.work(0)
    mate, sleeper = table.peers[PeerId("a")], table.peers[PeerId("b")]
    await table.until(lambda: sleeper.state.record.phase is Phase.AVERAGING)
    sleeper.task.cancel()  # its round goes on, but it commits nothing
    await table.until(lambda: sleeper.state.record.phase is Phase.AVERAGED and mate.state.record.phase is not Phase.AVERAGING)
    del table.peers[PeerId("b")]
    await table.finish(0)
    table.peers[sleeper.me] = sleeper
    sleeper.task = asyncio.ensure_future(sleeper.stepper.run())
    await table.finish(1)
    assert sleeper.stepper.reloads == 0
    assert_one_model(table)


async def test_copies_that_differ_become_one(table: Table) -> None:
    """As if the last stage's peers had finished a step with another sum, each taking the first stage for dead."""
    await table.finish(0)
    for name in ("y", "z"):
        state = table.peers[PeerId(name)].state
        with torch.no_grad():
            state.holdings.module.get_parameter(WEIGHT).add_(1e-3)
        state.record = replace(state.record, tied=Lineage(0, b"\xff" * 16), lineage=Lineage(0, b"another"))
    await table.until(lambda: len({peer.state.record.tied for peer in table.peers.values() if peer.state.holdings.tied_names}) == 1)
    await table.finish(1)
    assert_one_model(table)


async def test_the_log_tells_once_why_a_stages_state_is_downloaded_and_names_a_step_that_is_not_exact(table: Table) -> None:
    await table.finish(0)
    behind = table.peers[PeerId("b")]
    with capture_logs() as logs:
        behind.state.record = replace(behind.state.record, lineage=Lineage(1, b"worse"))
        await table.until(lambda: behind.stepper.reloads == 1 and behind.state.record.phase is not Phase.JOINING)
        for _ in range(3):
            behind.stepper._tell(SkipStep("nobody holds its average"), 1)
        entries = (RosterEntry(PeerId("a"), 1, 1, 0b0011), RosterEntry(PeerId("b"), 1, 1, 0b0110))
        behind.stepper._count(Roster(0, 1, 1, PeerId("a"), entries))
    told = [(line["log_level"], line["event"], line["step"]) for line in logs]
    download, given_up = ("info", "downloading the stage's state", 1), ("warning", "step given up: it is not exact", 1)
    assert told == [download, given_up, ("error", "an average is not exact", 1)]
    assert logs[0]["reason"] == "a stage mate has the better lineage"
    assert (behind.stepper.duplicates, behind.stepper.lost) == (1, 1)
