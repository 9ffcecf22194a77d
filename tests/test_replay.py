"""What several peers of each stage have made of a run with local steps is computed again in one process, from the logs of their moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, RemoteError, UsageError
from peerd.link.links import Bytes
from peerd.policy.step.asides import sums
from peerd.policy.step.ledger import indices
from peerd.policy.step.roster import Roster, entry_of
from peerd.reference import backward_of
from peerd.replay import Move, Replay, read_logs
from peerd.stage.calls import StageService
from peerd.stage.executor import Executor, Pace, Priority
from peerd.stage.moves import MoveCopy, beginning_of, name_of
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.wire.messages import Call, CallResult
from peerd.wire.tensors import encode
from tests.paper_host import PaperHost
from tests.strategies import view_of
from tests.tiny_run import replace_train, tiny_manifest

LOCAL = tiny_manifest(2, microbatches_per_step=12, local_batch=2, learning_rate=0.01, accumulate="float64", outer_momentum=0.5)
UNDER_WAY = 4


class Text:
    """Microbatches that depend on their numbers alone."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        chance, train = torch.Generator().manual_seed(1000 * step + index), self._manifest.train
        rows = 2, train.microbatch_size, train.sequence_length
        inputs, labels = torch.randint(0, self._manifest.model.vocab_size, rows, generator=chance).unbind(0)
        return inputs, labels

    def evaluation_microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass
class Hand:
    """One peer, with what a daemon would have around its stage."""

    swarm: Several
    state: StageState
    executor: Executor
    service: StageService = field(init=False)

    def __post_init__(self) -> None:
        self.service = StageService(self.swarm.manifest, self.state, self.executor, self, Pace(), PaperHost())

    @property
    def peer(self) -> PeerId:
        return self.state.record.peer

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        return await self.swarm.call(call, on_forwarded)

    def distrust(self, call: Call, peer: PeerId) -> None:
        raise AssertionError(f"a gradient of {peer} was refused")

    async def do(self, work: Callable[[], Any]) -> Any:
        return await self.executor.run(Priority.CONTROL, work)


@dataclass
class Several:
    """A few peers of each stage, without a network, and somebody who launches what is missing."""

    manifest: Manifest
    folder: Path
    chance: random.Random
    hands: list[Hand] = field(default_factory=list)
    number: int = 0
    copies: dict[str, MoveCopy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        for stage in range(self.manifest.train.num_stages):
            for name in "ab":
                self.join(PeerId(f"{name}{stage}"), stage)

    def join(self, peer: PeerId, stage: int, incarnation: int = 1) -> Hand:
        record = PeerRecord(peer=peer, incarnation=incarnation, stage=stage)
        state = StageState(self.manifest, record, torch.device("cpu"), lambda: self.view(state))
        state.keep_moves(self.folder)
        state.serve()
        self.hands.append(Hand(self, state, Executor()))
        return self.hands[-1]

    def view(self, state: StageState) -> LiveView:
        return view_of(state.record, *(hand.state.record for hand in self.of_stage(state.record.stage) if hand.state is not state))

    def of_stage(self, stage: int) -> list[Hand]:
        return [hand for hand in self.hands if hand.state.record.stage == stage]

    @property
    def stages(self) -> range:
        return range(self.manifest.train.num_stages)

    async def call(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        hand = self.chance.choice(self.of_stage(call.stage))
        on_forwarded(call.stage, hand.peer)
        self.number += 1

        async def receive() -> tuple[Bytes, ...]:
            return (*call.inputs.chunks, *call.labels.chunks)

        bare = replace(call, inputs=call.inputs.with_chunks(()), labels=call.labels.with_chunks(()))
        bare = replace(bare, call_id=self.number.to_bytes(16, "little"))
        result = await hand.service.backpropagate(PeerId("caller"), bare, receive, lambda _stage, _peer: None)
        if hand not in self.hands:
            raise RemoteError("it was killed")
        return result

    def missing(self, stage: int) -> int:
        held = 0
        for hand in self.of_stage(stage):
            held |= hand.state.record.done
        return (1 << self.manifest.train.microbatches_per_step) - 1 & ~held

    async def launch(self, step: int, index: int) -> None:
        inputs, labels = (encode(value.to(torch.int32)) for value in Text(self.manifest).microbatch(step, index))
        accumulate = frozenset(stage for stage in self.stages if self.missing(stage) >> index & 1)
        call = Call(call_id=bytes(16), stage=0, step=step, index=index, accumulate=accumulate, inputs=inputs, labels=labels)
        try:
            await self.call(call, lambda _stage, _peer: None)
        except RemoteError:
            return

    async def step(self, *, mishaps: Sequence[Callable[[Hand], Any]] = (), victim: PeerId | None = None) -> None:
        """Compute a step. The moment of each mishap, and of the victim's death, is drawn."""
        step, under_way = self.hands[0].state.record.step, set[asyncio.Task[None]]()
        at = sorted(self.chance.sample(range(self.manifest.train.microbatches_per_step), len(mishaps) + (victim is not None)))
        todo = [*mishaps, *([None] if victim else [])]
        self.chance.shuffle(todo)
        launched = 0
        while under_way or any(self.missing(stage) for stage in self.stages):
            lacking = sorted({index for stage in self.stages for index in indices(self.missing(stage))})
            busy = {task.get_name() for task in under_way}
            for index in [each for each in lacking if str(each) not in busy][: UNDER_WAY - len(under_way)]:
                under_way.add(asyncio.create_task(self.launch(step, index), name=str(index)))
                launched += 1
                if at and launched > at[0]:
                    at.pop(0)
                    await self.hit(todo.pop(), victim)
            await self.seal_some()
            if under_way:
                _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        await self.average()

    async def hit(self, mishap: Callable[[Hand], Any] | None, victim: PeerId | None) -> None:
        if mishap is None:
            self.hands = [hand for hand in self.hands if hand.peer != victim]
        else:
            hand = self.chance.choice(self.hands)
            await hand.do(lambda: mishap(hand))

    async def seal_some(self) -> None:
        for hand in self.hands:
            full = [aside for aside in hand.state.record.asides if aside.done.bit_count() >= self.manifest.train.local_batch]
            if full and self.chance.random() < 0.7:
                await hand.do(partial(hand.state.seal_batch, full[0].other))

    async def average(self) -> None:
        for stage in self.stages:
            hands = sorted(self.of_stage(stage), key=lambda hand: hand.peer)
            entries = tuple(entry_of(hand.state.record) for hand in hands)
            roster = Roster(stage, hands[0].state.record.step, 0, hands[0].peer, entries)
            shares = [await hand.do(partial(hand.state.open_round, roster)) for hand in hands]
            assert [reason for reason, _ in shares] == [""] * len(hands)
            total = sum((share for _, share in shares[1:]), shares[0][1])
            for hand in hands:
                await hand.do(partial(hand.state.take_average, roster, total.clone()))
        for hand in self.hands:
            await hand.do(hand.state.commit)

    def logs(self) -> list[list[Move]]:
        return read_logs(self.folder)

    def copy_moves(self) -> None:
        """What a daemon does after each average: each peer asks its mates for their moves."""
        for mate in self.hands:
            peer, incarnation, stage = mate.peer, mate.state.moves_since(0, 0).incarnation, mate.state.record.stage
            for hand in self.of_stage(stage):
                if hand is not mate:
                    name = f"{name_of(peer, incarnation, stage)}.kept-by-{hand.peer}.jsonl"
                    copy = self.copies.setdefault(name, MoveCopy(self.folder / name, beginning_of(peer, incarnation, stage)))
                    told = mate.state.moves_since(incarnation, copy.num_moves)
                    copy.add(told.first, told.lines)

    def replay(self) -> Replay:
        steps = self.hands[0].state.record.step
        found = Replay(self.manifest, self.logs(), partial(backward_of, self.manifest, Text(self.manifest)), steps)
        for _ in range(steps):
            found.play_step()
        return found

    def assert_like(self, replay: Replay) -> None:
        """Where gradients were summed in another order than in one process."""
        for hand in self.hands:
            mine = hand.state.holdings.module
            for name, value in replay.stages[hand.state.record.stage].named_parameters():
                assert torch.allclose(mine.get_parameter(name), value, rtol=0, atol=1e-9), (hand.peer, name)

    def assert_equal(self, replay: Replay) -> None:
        for hand in self.hands:
            mine, stage = hand.state.holdings, hand.state.record.stage
            for name, value in replay.stages[stage].named_parameters():
                assert torch.equal(mine.module.get_parameter(name), value), (hand.peer, name)
            state = replay.outer[stage].tensors()
            assert all(torch.equal(value, state[name]) for name, value in mine.optimizer.tensors().items())
        mine_told = [entry.loss for entry in self.of_stage(self.stages[-1])[0].state.history]
        assert mine_told == pytest.approx([entry.loss for entry in replay.history], abs=1e-12)


@asynccontextmanager
async def several(folder: Path, seed: int, **train: Any) -> AsyncIterator[Several]:
    found = Several(replace_train(LOCAL, **train), folder, random.Random(seed))
    everybody = [*found.hands]
    try:
        yield found
    finally:
        for hand in {id(hand): hand for hand in (*everybody, *found.hands)}.values():
            hand.executor.close()
            await hand.executor.ended()


def drop_a_batch(hand: Hand) -> None:
    hand.state.drop_sums([aside.other for aside in hand.state.record.asides][:1])


def drop_the_sealed(hand: Hand) -> None:
    if hand.peer in sums(hand.state.record):
        hand.state.drop_sums([hand.peer])


def fence(hand: Hand) -> None:
    hand.state.fence(hand.state.record.incarnation + 10)


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_a_run_is_computed_again_to_the_bit(tmp_path: Path, stages: int) -> None:
    async with several(tmp_path, stages, num_stages=stages) as swarm:
        for _ in range(3):
            await swarm.step()
        assert sum(hand.state.num_own_updates for hand in swarm.hands) > 3 * len(swarm.hands), "peers update more than once a step"
        versions = [move["versions"] for log in swarm.logs() for move in log if move["move"] == "add"]
        assert all(len(each) == stages for each in versions)
        assert any(all(each) for each in versions), "some were computed with updated parameters in all stages"
        swarm.assert_equal(swarm.replay())


@pytest.mark.parametrize("seed", range(6))
async def test_so_is_one_in_which_batches_and_ledgers_are_dropped_and_peers_are_fenced(tmp_path: Path, seed: int) -> None:
    async with several(tmp_path, seed) as swarm:
        for _ in range(3):
            await swarm.step(mishaps=[drop_a_batch, drop_the_sealed, fence, drop_a_batch])
        swarm.assert_equal(swarm.replay())


@pytest.mark.parametrize("seed", range(4))
async def test_so_is_one_in_which_a_peer_is_killed_and_another_joins(tmp_path: Path, seed: int) -> None:
    async with several(tmp_path, seed, dropout=0.1 * (seed % 2)) as swarm:
        await swarm.step()
        await swarm.step(victim=swarm.hands[seed % 4].peer, mishaps=[drop_the_sealed])
        await swarm.step()
        stage = seed % 4 // 2
        donor, joiner = swarm.of_stage(stage)[0], swarm.join(PeerId("c"), stage)
        state = donor.state.holdings.tensors(donor.state.record)
        await joiner.do(joiner.state.begin_joining)
        await joiner.do(lambda: joiner.state.load(state, donor.state.record.step, donor.state.record.lineage, donor.state.history))
        await joiner.do(joiner.state.serve)
        await swarm.step()
        swarm.assert_equal(swarm.replay())


@pytest.mark.parametrize(("after", "optimizer"), [(1, "adamw"), (2, "adamw"), (1, "sgd")])
async def test_so_is_one_with_a_synchronous_beginning(tmp_path: Path, after: int, optimizer: str) -> None:
    async with several(tmp_path, after, local_steps_after=after, optimizer=optimizer) as swarm:
        for _ in range(after):
            await swarm.step()
        assert sum(hand.state.num_own_updates for hand in swarm.hands) == 0
        moments = swarm.hands[0].state.holdings.optimizer.tensors()
        assert any(value.any() for value in moments.values()), "a newcomer that begins the first local step gets them"
        await swarm.step(mishaps=[drop_a_batch, drop_the_sealed])
        await swarm.step(victim=swarm.hands[after].peer)
        assert all(hand.state.num_own_updates for hand in swarm.hands)
        swarm.assert_like(swarm.replay())


@pytest.mark.parametrize("seed", range(2))
async def test_so_is_one_that_went_back_to_a_checkpoint_and_repeated_two_steps(tmp_path: Path, seed: int) -> None:
    async with several(tmp_path, seed) as swarm:
        await swarm.step()
        kept = [(hand.state.holdings.tensors(hand.state.record), hand.state.record.lineage, [*hand.state.history]) for hand in swarm.hands]
        await swarm.step(mishaps=[drop_the_sealed])
        await swarm.step()
        for hand, (tensors, lineage, history) in zip(swarm.hands, kept, strict=True):
            await hand.do(hand.state.begin_joining)
            await hand.do(partial(hand.state.load, tensors, 1, lineage, history))
            await hand.do(hand.state.serve)
        for _ in range(3):
            await swarm.step()
        swarm.assert_equal(swarm.replay())


async def test_without_the_log_of_one_peer_the_run_cannot_be_computed_again(tmp_path: Path) -> None:
    async with several(tmp_path, 0) as swarm:
        await swarm.step()
        next(tmp_path.glob("a0-*")).unlink()
        with pytest.raises(UsageError, match="no log says"):
            swarm.replay()


@pytest.mark.parametrize("lost", ["a0", "b1"])
async def test_a_run_is_computed_again_although_a_disk_is_lost(tmp_path: Path, lost: str) -> None:
    async with several(tmp_path, 3) as swarm:
        for _ in range(3):
            await swarm.step(mishaps=[drop_the_sealed])
            swarm.copy_moves()
        next(path for path in tmp_path.glob(f"{lost}-*") if "kept-by" not in path.name).unlink()
        assert len(list(tmp_path.iterdir())) == 7
        swarm.assert_equal(swarm.replay())


@pytest.mark.parametrize("seed", range(2))
async def test_where_all_peers_stop_their_moments_start_anew_and_the_outer_momentum_goes_on(tmp_path: Path, seed: int) -> None:
    async with several(tmp_path, seed) as swarm:
        await swarm.step()
        await swarm.step()
        stopped, swarm.hands = swarm.hands, []
        for hand in stopped:
            record, kept = hand.state.record, hand.state.holdings.tensors(hand.state.record)
            again = swarm.join(hand.peer, record.stage, incarnation=2)
            await again.do(again.state.begin_joining)
            await again.do(partial(again.state.load, kept, record.step, record.lineage, [*hand.state.history]))
            await again.do(again.state.serve)
            assert any(value.any() for name, value in kept.items() if name.endswith(".outer_momentum"))
            assert not any(name.startswith("inner/") for name in kept)
            hand.executor.close()
        await swarm.step(mishaps=[drop_a_batch])
        assert sum(hand.state.num_own_updates for hand in swarm.hands) > len(swarm.hands)
        swarm.assert_equal(swarm.replay())


async def test_a_call_or_a_result_that_does_not_say_with_which_versions_it_was_computed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with several(tmp_path, 0) as swarm:
        calls, call = list[Call](), swarm.call

        async def silent(made: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
            calls.append(made)
            return replace(await call(made, on_forwarded), versions=())

        monkeypatch.setattr(swarm, "call", silent)
        with pytest.raises(AssertionError, match="was refused"):
            await swarm.launch(0, 0)
        assert [len(made.versions) for made in calls] == [0, 1]
        with pytest.raises(BadMessageError, match="does not say with which versions"):
            await call(replace(calls[1], versions=()), lambda _stage, _peer: None)
