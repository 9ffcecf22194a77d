"""A peer of a middle stage without its network, and the same module as a tutorial would train it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from peerd.config.codec import parse_codec
from peerd.config.manifest import Manifest
from peerd.errors import UsageError
from peerd.link.links import Bytes
from peerd.policy.step.roster import Roster, entry_of
from peerd.stage.calls import StageService
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.executor import Executor, Pace
from peerd.stage.precision import run_module
from peerd.stage.snapshots import Downloaded
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord, RawRecord
from peerd.table.view import LiveView
from peerd.transfers import to_device
from peerd.wire.messages import Call, CallResult
from peerd.wire.tensors import encode

STAGE, NUM_STAGES = 1, 3


class Alone:
    """The host of a stage that has no network."""

    is_committing = False

    async def until_committed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    def cannot_compute(self) -> None:
        raise UsageError("the device has no memory for this stage", "use a smaller --batch, --sequence or --millions, or --recompute")

    def own_records(self) -> tuple[RawRecord, ...]:
        return ()

    def absorb(self, records: Sequence[RawRecord], sender: PeerId) -> None: ...

    def why_refuse_caller(self, caller: PeerId, stage: int) -> None: ...

    def ledger_grew(self) -> None: ...


class Stage:
    """A peer of the middle stage, without its network."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest, self.device = manifest, device
        self.state = StageState(manifest, PeerRecord(peer=PeerId("me"), incarnation=1, stage=STAGE), device, self.live)
        self.state.serve()
        self.executor = Executor()
        self._all: asyncio.Barrier | None = None
        self.service = StageService(manifest, self.state, self.executor, self, Pace(), Alone())
        train, codec = manifest.train, parse_codec(manifest.wire.activations)
        shape = manifest.boundary_shape(STAGE, train.sequence_length)
        chance = torch.Generator().manual_seed(0)
        self.inputs, self.gradient = torch.randn(shape, generator=chance), torch.randn(shape, generator=chance) * 1e-3
        self.sent = encode(self.inputs, codec)
        self.given = encode(self.gradient, codec)
        self.labels = encode(torch.zeros(train.microbatch_size, train.sequence_length, dtype=torch.int32))

    def live(self) -> LiveView:
        return LiveView(me=self.state.record.peer, records=(self.state.record,))

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        """Be the next stage: it answers at once, unless all are waited for."""
        on_forwarded(call.stage, PeerId("next"))
        if self._all is not None:
            await self._all.wait()
        return CallResult(gradient=self.given, downstream_s=0.0, records=())

    def distrust(self, call: Call, peer: PeerId) -> None:
        raise AssertionError(f"a gradient of {peer} was refused for microbatch {call.index}")

    async def microbatch(self, index: int) -> None:
        """Take one through the service of calls, as a daemon does."""

        async def receive() -> tuple[Bytes, ...]:
            return (*self.sent.chunks, *self.labels.chunks)

        bare = self.sent.with_chunks(()), self.labels.with_chunks(())
        call = Call(
            call_id=index.to_bytes(16, "little"),
            stage=STAGE,
            step=self.state.record.step,
            index=index,
            accumulate=frozenset(range(NUM_STAGES)),
            inputs=bare[0],
            labels=bare[1],
        )
        await self.service.backpropagate(PeerId("caller"), call, receive, lambda _stage, _peer: None)

    async def all_slots(self) -> None:
        """Take as many microbatches through as there are slots, so that all are in hand before the first gradient comes."""
        count = min(self.service.slots, self.manifest.train.microbatches_per_step)
        self._all = asyncio.Barrier(count)
        await self.microbatches(range(count))

    async def microbatches(self, indices: range) -> None:
        """Take these through with as many in hand as the run's slots."""
        slots = asyncio.Semaphore(self.service.slots)

        async def one(index: int) -> None:
            async with slots:
                await self.microbatch(index)

        await asyncio.gather(*map(one, indices))

    def round(self) -> None:
        entry = entry_of(self.state.record)
        roster = Roster(STAGE, self.state.record.step, 0, entry.peer, (entry,))
        reason, copy = self.state.open_round(roster)
        assert copy is not None, reason
        self.state.take_average(roster, copy)

    def commit(self) -> None:
        self.state.commit()
        self.state.applied = None

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of everything."""
        self.executor.close()
        loop.run_until_complete(self.executor.ended())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        self.state.release()

    def checkpoint(self, folder: Path) -> Callable[[], None]:
        """Lend the state. The value writes it, on any thread."""
        state = self.state
        lease = state.holdings.lend(state.record)
        lent = Downloaded(state.record.step, state.record.lineage, lease.tensors, ())
        return lambda: CheckpointStore(folder, NUM_STAGES).save(STAGE, lent, lease.end)


class Plain:
    """The same module, as a tutorial would train it."""

    def __init__(self, stage: Stage) -> None:
        self._train, self._module = stage.manifest.train, stage.state.holdings.module
        self._recomputes = stage.manifest.compute.recompute == "always"
        self._inputs, self._gradient = (to_device(each, stage.device) for each in (stage.inputs, stage.gradient))
        self._parameters = list(self._module.parameters())
        self._sums = [torch.zeros_like(each) for each in self._parameters]

    def microbatches(self, count: int) -> None:
        for _ in range(count):
            if self._recomputes:
                with torch.no_grad():
                    run_module(self._train, self._module, self._inputs)
            output = run_module(self._train, self._module, self._inputs.detach().requires_grad_())
            torch._foreach_add_(self._sums, list(torch.autograd.grad(output, self._parameters, self._gradient)))
