"""The members of an all-reduce: gloo, hivemind's AllReduceRunner and averager, and peerd. Each member is a process.

`python -m scripts.benchmarks._allreduce JSON` is one member. A round is: `ready` (fill a vector with values that depend on member and
round), `go` (timed: from the order until this member has the whole average in memory), `result` (its hash and its error).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from peerd.errors import PeerdError
from peerd.stage.results import HeldAverage
from peerd.table.record import NO_RECORD, PeerId, RawRecord, RunId
from scripts.benchmarks._sides import PATIENCE_S, TIMEOUT_S, serve

NUM_MICROBATCHES = 16
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    side: str
    rank: int
    num_members: int
    folder: str
    num_layers: int = 0
    """Layers of the decoder that is peerd's stage."""
    length: int = 0
    """Length of the vector, for the other sides."""


def values_of(rank: int, number: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * number + rank))


def judged(total: Tensor, number: int, job: Job) -> dict[str, Any]:
    """Hash and relative error of a sum (or of a mean times the number of members). The error, slow to compute, only in round 0."""
    error = 0.0
    if number == 0 and job.rank == 0:
        exact = torch.zeros(total.numel(), dtype=torch.float64)
        for rank in range(job.num_members):
            exact += values_of(rank, number, total.numel())
        error = float((total - exact).norm() / exact.norm())
    return {"digest": blake3(memoryview(total.numpy().data).cast("B")).hexdigest(), "error": error}


def share_of(rank: int, num_members: int) -> int:
    """The microbatches that a member holds, as a bit mask: every n-th of n members."""
    return ((1 << NUM_MICROBATCHES) - 1) // ((1 << num_members) - 1) << rank


class Gloo:
    """torch.distributed: no encryption, no faults, a fixed group."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._values = torch.empty(0)

    async def open(self) -> dict[str, Any]:
        from torch import distributed

        store = f"file://{self._job.folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=self._job.rank, world_size=self._job.num_members)
        return {}

    async def meet(self, others: Sequence[dict[str, Any]]) -> None:
        return

    async def ready(self, number: int, **_variant: Any) -> dict[str, Any]:
        self._values = values_of(self._job.rank, number, self._job.length)
        return {}

    async def go(self, others: Sequence[dict[str, Any]]) -> float:
        from torch import distributed

        began_s = time.monotonic()
        distributed.all_reduce(self._values)
        return time.monotonic() - began_s

    async def result(self, number: int) -> dict[str, Any]:
        return judged(self._values, number, self._job)

    async def close(self) -> None:
        return


class Hivemind:
    """hivemind 1.1.12's AllReduceRunner with its defaults, over its p2pd."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._p2p: Any = None
        self._values = torch.empty(0)
        self._runner: Any = None

    async def open(self) -> dict[str, Any]:
        from hivemind.p2p import P2P

        self._p2p = await P2P.create()
        return {"peer": self._p2p.peer_id.to_base58(), "addresses": [str(each) for each in await self._p2p.get_visible_maddrs()]}

    async def meet(self, others: Sequence[dict[str, Any]]) -> None:
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        self._peers = tuple(PeerID.from_base58(other["peer"]) for other in others)
        for other in others[: self._job.rank]:
            bare = [Multiaddr(address.split("/p2p/")[0]) for address in other["addresses"]]
            await self._p2p._client.connect(PeerID.from_base58(other["peer"]), bare)

    async def ready(self, number: int, **_variant: Any) -> dict[str, Any]:
        from hivemind.averaging.allreduce import AllReduceRunner

        self._values = values_of(self._job.rank, number, self._job.length)
        name = f"round-{number}"
        self._runner = AllReduceRunner(
            p2p=self._p2p, servicer_type=AllReduceRunner, prefix=name, group_id=name.encode(), tensors=[self._values],
            ordered_peer_ids=self._peers, peer_fractions=(1 / len(self._peers),) * len(self._peers), weight=1.0,
        )  # fmt: skip
        await self._runner.add_p2p_handlers(self._p2p, namespace=name)
        return {}

    async def go(self, others: Sequence[dict[str, Any]]) -> float:
        began_s = time.monotonic()
        async for delta in self._runner:  # there is one tensor, so one delta
            self._values += delta
        return time.monotonic() - began_s

    async def result(self, number: int) -> dict[str, Any]:
        return judged(self._values * self._job.num_members, number, self._job)

    async def close(self) -> None:
        if self._p2p is not None:
            await self._p2p.shutdown()


class Averager:
    """hivemind 1.1.12's DecentralizedAverager with its defaults, in processes that it forks. It finds its group before `go`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._dht: Any = None
        self._averager: Any = None
        self._step: Any = None

    async def open(self) -> dict[str, Any]:
        if self._job.rank > 0:
            return {}
        self._join([])
        return {"addresses": [str(each) for each in self._dht.get_visible_maddrs()]}

    async def meet(self, others: Sequence[dict[str, Any]]) -> None:
        from hivemind.averaging import DecentralizedAverager

        if self._dht is None:
            self._join(others[0]["addresses"])
        self._averager = DecentralizedAverager(
            [torch.zeros(self._job.length)], self._dht, start=True, prefix="bench",
            target_group_size=self._job.num_members, min_group_size=self._job.num_members,
        )  # fmt: skip

    def _join(self, contacts: Sequence[str]) -> None:
        """Runs on the main thread, like the averager, because hivemind forks from it."""
        from hivemind import DHT

        self._dht = DHT(contacts, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])

    async def ready(self, number: int, **_variant: Any) -> dict[str, Any]:
        from hivemind.averaging.control import AveragingStage

        with self._averager.get_tensors() as (tensor,):
            tensor.copy_(values_of(self._job.rank, number, self._job.length))
        self._step = await asyncio.to_thread(self._averager.step, require_trigger=True, wait=False, timeout=TIMEOUT_S)
        while self._step.stage is not AveragingStage.AWAITING_TRIGGER:  # noqa: ASYNC110 - a byte in memory that another process writes
            await asyncio.sleep(POLL_S)
        return {}

    async def go(self, others: Sequence[dict[str, Any]]) -> float:
        began_s = time.monotonic()
        self._step.allow_allreduce()
        await asyncio.to_thread(self._step.result)
        return time.monotonic() - began_s

    async def result(self, number: int) -> dict[str, Any]:
        with self._averager.get_tensors() as (tensor,):
            return judged(tensor * self._job.num_members, number, self._job)

    async def close(self) -> None:
        for each in (self._averager, self._dht):
            if each is not None:
                await asyncio.to_thread(each.shutdown)


class Peerd:
    """A peer with all parts of an averaging round: the real rounds, state, executor, services, tunnel and direct paths."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stack = contextlib.AsyncExitStack()
        self._changed = asyncio.Event()
        self._members: list[PeerId] = []

    async def open(self) -> dict[str, Any]:
        from peerd.averaging.log import AverageLog
        from peerd.averaging.rounds import Rounds
        from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig
        from peerd.stage.executor import Executor, Priority
        from peerd.stage.state import StageState
        from peerd.table.record import PeerRecord
        from peerd.table.view import LiveView
        from peerd.wire.clients import AveragingClient
        from peerd.wire.services import AveragingServicer
        from scripts.benchmarks._daemon import RUN, on_network

        manifest = Manifest(
            model=ModelConfig(num_layers=self._job.num_layers, d_model=512, num_heads=8, d_ff=2048),
            train=TrainConfig(num_stages=1, microbatches_per_step=NUM_MICROBATCHES),
            compute=ComputeConfig(threads=1),
        )
        self._daemon = daemon = await self._stack.enter_async_context(on_network(self._job.folder, self._job.rank))
        self._executor = Executor()
        self._stack.callback(self._executor.close)
        record = PeerRecord(peer=daemon.peer, incarnation=1)
        live = LiveView(me=daemon.peer, records=(record,))
        self._state = await self._executor.run(Priority.CONTROL, lambda: StageState(manifest, record, torch.device("cpu"), lambda: live))
        await self._executor.run(Priority.CONTROL, self._state.serve)
        log = AverageLog(daemon.network.home.averages, torch.float32)
        self._rounds = Rounds(self._state, self._executor, AveragingClient(daemon.links, RUN), log, PATIENCE_S, time.monotonic, self)
        self._stack.callback(self._rounds.shut)
        handler: Any = self._rounds  # nobody here asks for a finished average
        await daemon.serve([AveragingServicer(daemon.door, handler)])
        return {**daemon.hello, "length": self._state.accumulator.flat.numel()}

    # As the host of its rounds

    def own_record(self) -> RawRecord:
        return NO_RECORD

    def learn(self, *records: RawRecord) -> None: ...

    def is_mate(self, peer: PeerId) -> bool:
        return True

    def cut_links(self) -> tuple[tuple[PeerId, PeerId], ...]:
        return ()

    def mates(self) -> Iterable[PeerId]:
        return self._members

    def delivered(self, peer: PeerId, num_bytes: int, took_s: float) -> None: ...

    def pass_s(self) -> float:
        return 0.0

    def rose_s(self, peer: PeerId) -> float:
        return time.monotonic()

    @property
    def kept_parts(self) -> None:
        """Nobody audits."""

    @property
    def run(self) -> RunId:
        from scripts.benchmarks._daemon import RUN

        return RUN

    def sign(self, message: bytes) -> bytes:
        return self._daemon.identity.sign(message)

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        from peerd.link.peer_keys import public_key_of, verify

        return verify(public_key_of(peer), message, signature)

    def is_near(self, _peer: PeerId) -> bool:
        return False

    def is_lossy(self, _peer: PeerId) -> bool:
        return False

    def rates_of(self, peer: PeerId) -> tuple[float | None, float | None]:
        return None, None

    def report_failure(self, peer: PeerId) -> None: ...

    def too_large(self, peer: PeerId, step: int) -> None: ...

    def round_opened(self) -> None: ...

    def announce(self) -> None:
        self._changed.set()

    def averages_needed_from(self) -> int | None: ...

    def applied(self, held: HeldAverage) -> None: ...

    async def meet(self, others: Sequence[dict[str, Any]]) -> None:
        await self._daemon.meet(others)

    async def ready(self, number: int, codec: str, direct: bool) -> dict[str, Any]:
        """Apply the last average, as after any step, and fill a ledger for the next."""
        from peerd.averaging.compression import Compression
        from peerd.config.codec import parse_allowed
        from peerd.stage.executor import Priority

        if self._state.average is not None:
            self._rounds.applied(await self._executor.run(Priority.CONTROL, self._state.commit))
            await asyncio.gather(*self._rounds._tasks.running)  # they write the average to disk

        def fill() -> None:
            flat = self._state.accumulator.flat
            flat.copy_(values_of(self._job.rank, number, flat.numel()))
            self._state.record = replace(self._state.record, done=share_of(self._job.rank, self._job.num_members))

        await self._executor.run(Priority.CONTROL, fill)
        self._rounds.compression = Compression(parse_allowed(codec), torch.float32)
        self._daemon.use(direct)
        return {"peer": self._state.record.peer, "ledger_no": self._state.record.ledger_no}

    async def go(self, others: Sequence[dict[str, Any]]) -> float:
        """Seconds from the leader's proposal until this peer has checked and taken the average."""
        from peerd.policy.step.roster import Roster, RosterEntry
        from peerd.table.record import Phase

        self._members = [other["peer"] for other in others]
        began_s, record = time.monotonic(), self._state.record
        shares = [share_of(rank, len(others)) for rank in range(len(others))]
        entries = sorted(RosterEntry(other["peer"], 1, other["ledger_no"], share) for other, share in zip(others, shares, strict=True))
        roster = Roster(0, record.step, 0, entries[0].peer, tuple(entries))
        if roster.leader == record.peer and (reason := await self._rounds.lead(roster)):
            raise PeerdError(reason)
        async with asyncio.timeout(TIMEOUT_S):
            while self._state.record.phase is not Phase.AVERAGED:
                self._changed.clear()
                await self._changed.wait()
        return time.monotonic() - began_s

    async def result(self, number: int) -> dict[str, Any]:
        assert self._state.average is not None
        assert self._rounds.failed == 0
        return judged(self._state.average.flat_sum, number, self._job)

    async def close(self) -> None:
        await self._stack.aclose()


SIDES = {"gloo": Gloo, "hivemind": Hivemind, "averager": Averager, "peerd": Peerd}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    tempfile.tempdir = job.folder  # what hivemind's forks leave there is removed with the folder
    torch.set_num_threads(1)
    serve(SIDES[job.side](job))


if __name__ == "__main__":
    main()
