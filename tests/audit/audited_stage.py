"""The last stage of a run of two, whose peers audit each other in one process, and the peer of the stage before, which calls them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from blake3 import blake3

from peerd.audit.auditor import Auditor
from peerd.audit.cases import Cases
from peerd.audit.replays import Replays
from peerd.audit.store import CaseStore
from peerd.audit.tallies import AuditOutcome
from peerd.config.manifest import Manifest, SwarmConfig
from peerd.errors import PeerGoneError
from peerd.link.links import Bytes
from peerd.policy.step.auditing import Rates
from peerd.policy.step.coins import heads_of
from peerd.policy.step.evidence import Evidence
from peerd.policy.step.parts import chunk_text, even_cuts, slice_bounds
from peerd.policy.step.receipts import AskedPass, SentOn, SignedAsk, SignedPass
from peerd.policy.step.roster import Roster, entry_of
from peerd.policy.step.verdicts import Standing
from peerd.stage.calls import StageService
from peerd.stage.executor import Executor, Pace
from peerd.stage.state import StageState
from peerd.stage.witnessing import PassWitness, most_kept_bytes
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.wire.audit_client import AuditClient, KeptTensors
from peerd.wire.audit_service import WantedBytes
from peerd.wire.messages import Call, CallResult, TensorBytes
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import decode, encode
from tests.paper_host import PaperHost
from tests.stage.signed_life import PLENTY, Key
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

CPU = torch.device("cpu")


def manifest_of(num_microbatches: int) -> Manifest:
    manifest = tiny_manifest(2, microbatches_per_step=num_microbatches)
    return replace(manifest, swarm=SwarmConfig(trust="audits", group_size=0))


@dataclass
class Mate:
    """One peer of the stage, or the one before it, which has no service."""

    stage_of: AuditedStage
    number: int
    stage: int = 1
    factor: float = 1.0
    """It multiplies each gradient that it gives back by this."""
    part_factor: float = 1.0
    """It multiplies its part of each average by this."""
    ledger: bytes | None = None
    """It says in its receipts that it has added each microbatch to this ledger; None: to the one that it has added it to."""
    lineage: bytes | None = None
    """It says in its receipts that it has computed with parameters of this lineage; None: with those that it has."""
    fetched: Counter[WantedBytes] = field(default_factory=Counter)
    """The bytes of tensors that it got for its audits."""
    serving: asyncio.Future[CallResult] | None = None
    """The last call to it."""
    key: Key = field(default_factory=Key)
    cast: list[PeerId] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifest = self.stage_of.manifest
        record = PeerRecord(peer=self.key.peer, incarnation=1, stage=self.stage, coins=heads_of(self.coins_seed, 0))
        self.state = StageState(manifest, record, CPU, lambda: view_of(self.state.record))
        self.state.serve()
        self.executor = Executor()
        self.witness = PassWitness(self.state, self.key, most_kept_bytes(manifest, PLENTY))
        self.answers, self.witness.answers = self.witness.answers, self._answers  # type: ignore[method-assign]
        self.service = StageService(manifest, self.state, self.executor, cast(Any, None), Pace(), PaperHost(), witness=self.witness)
        client = cast(AuditClient, Lines(self))
        replays = Replays(manifest, self.state, self.executor, self.witness, client, self)
        self.cases = Cases(self.me, self.run, Standing(self.stage_of.rates) if self.stage_of.rates else Standing())
        folder = self.stage_of.folder
        self.store = CaseStore(folder / self.me, self.cases) if folder is not None else None
        self.auditor = Auditor(self.state, self.witness, replays, client, self.cases, self)

    async def _answers(self, given: Any, result: CallResult, below: Any) -> CallResult:
        if self.factor != 1.0 and result.gradient is not None:
            result = replace(result, gradient=encode(self.factor * decode(result.gradient, CPU)))
        if self.stage_of.hangs_up and self.serving is not None:
            self.serving.cancel()
        if self.ledger is not None:
            result = replace(result, ledger=self.ledger)
        if (told := self.lineage) is not None:
            self.witness.lineage_at = lambda step: told  # type: ignore[method-assign]
        try:
            return await self.answers(given, result, below)
        finally:
            self.witness.__dict__.pop("lineage_at", None)

    @property
    def run(self) -> Any:
        return self.key.run

    @property
    def me(self) -> PeerId:
        return self.key.peer

    @property
    def coins_seed(self) -> bytes:
        return self.key.coins_seed

    @property
    def patience_s(self) -> float:
        return self.stage_of.patience_s

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return self.key.has_signed(peer, message, signature)

    def live(self) -> LiveView:
        out = set(self.cast)
        return view_of(*(each.state.record for each in self.stage_of.all if each.me not in out))

    def pass_s(self) -> float:
        return 0.0

    async def keep_cases(self) -> None:
        if self.store is not None:
            await self.store.keep()

    def cast_out(self, peers: Sequence[PeerId]) -> None:
        self.cast = list(peers)


@dataclass
class Lines:
    """What one peer reaches of the others."""

    mate: Mate

    def _other(self, peer: PeerId) -> Mate:
        found = next(each for each in self.mate.stage_of.all if each.me == peer)
        if self.mate.stage_of.is_cut(self.mate, found):
            raise PeerGoneError("cut")
        return found

    async def get_receipts(
        self, peer: PeerId, stage: int, step: int, known: Collection[bytes], most: int, patience_s: float
    ) -> tuple[Sequence[Evidence], Sequence[SignedPass]]:
        found = self._other(peer).auditor.receipts(stage, step, frozenset(known))
        assert len(found[1]) <= most
        return found

    async def get_sent_on(
        self, peer: PeerId, stage: int, step: int, known: Collection[bytes], most: int, patience_s: float
    ) -> Sequence[SentOn]:
        return self._other(peer).auditor.sent_on(stage, step, known)

    async def get_pass(self, peer: PeerId, step: int, signed: bytes, wanted: WantedBytes, patience_s: float) -> KeptTensors:
        return wanted_of(self._other(peer).auditor.kept_pass(signed), wanted, self.mate.fetched)

    async def tell_case(self, peer: PeerId, evidence: Evidence, timeout_s: float) -> Evidence | None:
        return await self._other(peer).auditor.hear(evidence)


@dataclass
class AuditedStage:
    """`num_mates` peers of the last stage. The first ones are liars, with these factors."""

    num_mates: int = 4
    factors: Sequence[float] = ()
    part_factors: Sequence[float] = ()
    rates: Any = None
    patience_s: float = 0.3
    folder: Path | None = None
    """Where each peer has a home; None: nowhere."""
    hangs_up: bool = False
    """Whether the caller ends each call between its computation and the signature of the answer."""
    is_cut: Callable[[Mate, Mate], bool] = lambda _one, _other: False

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.manifest = manifest_of(2 * self.num_mates)
        self.caller = Mate(self, -1, stage=0)
        factors = [*self.factors, *(1.0 for _ in range(self.num_mates))]
        self.mates = [Mate(self, number, factor=factors[number]) for number in range(self.num_mates)]
        for mate, factor in zip(self.mates, self.part_factors, strict=False):
            mate.part_factor = factor
        self.trainer = Key()
        self.running, self.bystanders = list[asyncio.Task[None]](), list[Mate]()

    @property
    def all(self) -> list[Mate]:
        return [self.caller, *self.mates]

    def bystander(self) -> Mate:
        """A peer of the stage before, of which nobody knows."""
        self.bystanders.append(Mate(self, -1, stage=0))
        return self.bystanders[-1]

    def begin(self) -> None:
        self.running = [asyncio.ensure_future(each.auditor.run()) for each in self.mates]

    async def end(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        for each in [*self.all, *self.bystanders]:
            await each.auditor._work.close()
            each.executor.close()
            await each.executor.ended()

    async def step(self) -> None:
        """Do a step: each mate has its microbatches, and all have the average."""
        step = self.mates[0].state.record.step
        for index in range(self.manifest.train.microbatches_per_step):
            await self._send(self.mates[index % self.num_mates], step, index)
        entries = tuple(sorted((entry_of(each.state.record) for each in self.mates), key=lambda entry: entry.peer))
        roster = Roster(1, step, 0, entries[0].peer, entries, num_chunks=3)
        parts = []
        for each in self.mates:
            reason, copy = each.state.open_round(roster)
            assert copy is not None, reason
            parts.append(each.part_factor * copy)
        self._send_parts(roster, dict(zip((each.me for each in self.mates), parts, strict=True)))
        for each in self.mates:
            each.state.take_average(roster, torch.stack(parts).sum(0))
            held = each.state.commit(each.state.record.gradient_norm)
            each.auditor.applied(held.roster, held.lineage)
        self.caller.state.record = replace(self.caller.state.record, step=step + 1)

    def _send_parts(self, roster: Roster, parts: dict[PeerId, torch.Tensor]) -> None:
        """Each mate gets the chunks of its slice of all others' parts, and keeps one of each."""
        mates = {each.me: each for each in self.mates}
        for reducer, (start, end) in enumerate(slice_bounds(roster, len(next(iter(parts.values()))))):
            cuts = even_cuts(start, end, roster.num_chunks)
            for author, peer in enumerate(roster.peers):
                kept = mates[roster.peers[reducer]].witness.parts
                for number in range(roster.num_chunks):
                    if author != reducer and kept.wants(roster, peer, number):
                        content = parts[peer][cuts[number] : cuts[number + 1]].numpy().tobytes()
                        place = reducer, author, number
                        text = chunk_text(roster.average_id, place, blake3(content).digest())
                        kept.put(roster, place, [content], mates[peer].sign(text))

    async def _send(self, mate: Mate, step: int, index: int) -> None:
        train, chance = self.manifest.train, torch.Generator().manual_seed(1000 * step + index)
        rows = train.microbatch_size, train.sequence_length
        labels = torch.randint(0, self.manifest.model.vocab_size, rows, generator=chance, dtype=torch.int32)
        inputs = encode(torch.randn((*rows, self.manifest.decoder.d_model), generator=chance))
        number = step.to_bytes(8, "little") + index.to_bytes(8, "little")
        got = AskedPass(0, step, index, self.trainer.peer, self.caller.me, b"t" * 32, tensor_hash(encode(labels)))
        call = Call(
            call_id=number,
            stage=1,
            step=step,
            index=index,
            accumulate=frozenset({0, 1}),
            inputs=inputs,
            labels=encode(labels),
            above=SignedAsk(got, self.trainer.sign(got.text(self.trainer.run))),
        )
        signed, asked = await self.caller.witness.asks(call, mate.me)

        async def receive() -> tuple[Bytes, ...]:
            return (*call.inputs.chunks, *call.labels.chunks)

        bare = replace(signed, inputs=_empty(inputs), labels=_empty(call.labels))
        serving = asyncio.ensure_future(mate.service.backpropagate(self.caller.me, bare, receive, lambda _stage, _peer: None))
        mate.serving = serving
        try:
            await self.caller.witness.took(signed, asked, await serving)
        except asyncio.CancelledError:
            assert self.hangs_up


def wanted_of(kept: KeptTensors, wanted: WantedBytes, fetched: Counter[WantedBytes]) -> KeptTensors:
    """What an auditor gets of kept tensors, and counts."""
    for which, each in zip(WantedBytes, kept, strict=True):
        fetched[which] += each.num_bytes if each is not None and which in wanted else 0
    inputs, labels, gradient = kept
    return (
        inputs if WantedBytes.INPUTS in wanted else _empty(inputs),
        labels if WantedBytes.LABELS in wanted else _empty(labels),
        gradient if gradient is None or WantedBytes.GRADIENT in wanted else _empty(gradient),
    )


def _empty(value: TensorBytes) -> TensorBytes:
    return value.with_chunks(())


ALL = Rates(newcomer=9.0, usual=9.0, odd=9.0, settled=9.0)
"""Every peer computes everything again."""

UNTIL_S = 20


def lived(act: Callable[[AuditedStage], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        stage = AuditedStage(**{"rates": ALL, **settings})
        stage.begin()
        try:
            await act(stage)
        finally:
            await stage.end()

    asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(UNTIL_S):
        while not is_so():  # noqa: ASYNC110 - several peers change what is looked at
            await asyncio.sleep(0.01)


def counts(mate: Mate) -> dict[AuditOutcome, int]:
    return dict(mate.auditor.tallies.counts)


def num_done(mate: Mate) -> int:
    return sum(
        mate.auditor.tallies.counts[each] for each in (AuditOutcome.RIGHT, AuditOutcome.DIFFERS, AuditOutcome.ACCUSED, AuditOutcome.MISSED)
    )
