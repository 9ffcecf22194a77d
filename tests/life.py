"""A whole run in one process, one peer a stage, on any device: what a daemon does with a stage's tensors, without its network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.link.links import Bytes
from peerd.models.stages import labels_shape
from peerd.policy.step.norms import combine
from peerd.policy.step.roster import Roster, entry_of
from peerd.policy.step.tied import sum_id
from peerd.stage.calls import StageService
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.executor import Executor, Pace
from peerd.stage.snapshots import Downloaded
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from peerd.wire.messages import Call, CallResult
from peerd.wire.tensors import encode
from tests.paper_host import PaperHost
from tests.strategies import view_of

CPU = torch.device("cpu")
STEPS = 2
MOST_WAITS = 2
"""Of a stage for one microbatch: for its activations, and for its gradients; the last stage's are for the loss and for the gradients."""
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "tf32": {"precision": "tf32"},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16", "loss_scale": 2.0**10},
    "float64 sums": {"accumulate": "float64"},
    "lamb": {"optimizer": "lamb", "max_gradient_norm": 0.5},
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1},
    "8 bits": {"optimizer_bits": 8},
    "dropout": {"dropout": 0.1},
    "delayed updates": {"delayed_updates": True},
    "parameter averaging": {"average_parameters": "always", "average_parameters_every_steps": 2},
    "local steps": {"local_batch": 3},
    "evaluation": {"evaluate_every_steps": 1, "evaluation_fraction": 0.1},
}
HALVES = ("bfloat16", "float16")
RUNS = [
    *((option, False, False) for option in OPTIONS),
    *((option, True, False) for option in ("float32", *HALVES, "delayed updates")),
    *((option, False, True) for option in ("float32", "8 bits", "delayed updates", "local steps", "evaluation")),
]
"""The options of a run, whether graphs are kept, and whether what is not computed with lies in the machine's memory."""


@dataclass
class Life:
    """One run. Each job runs on its stage's torch thread, as in a daemon; a microbatch goes through the services and their codecs."""

    manifest: Manifest
    device: torch.device
    keep_graph: bool = False
    offloads: bool = False
    states: list[StageState] = field(default_factory=list)
    services: list[StageService] = field(default_factory=list)
    executors: list[Executor] = field(default_factory=list)
    waits: list[Counter[str]] = field(default_factory=list)
    """What each stage waited for in its last microbatch."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        for stage in range(self.manifest.train.num_stages):
            record = PeerRecord(peer=PeerId(f"p{stage}"), incarnation=1, stage=stage)
            live = lambda record=record: view_of(record)  # noqa: E731
            state = StageState(self.manifest, record, self.device, live, self.keep_graph, offloads=self.offloads)
            state.serve()
            self.states.append(state)
            self.executors.append(Executor())
            self.services.append(StageService(self.manifest, state, self.executors[-1], self, Pace(), PaperHost()))
        self.waits = [Counter() for _ in self.states]

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        on_forwarded(call.stage, PeerId(f"p{call.stage}"))

        async def receive() -> tuple[Bytes, ...]:
            return (*call.inputs.chunks, *call.labels.chunks)

        bare = replace(call, inputs=call.inputs.with_chunks(()), labels=call.labels.with_chunks(()))
        return await self.services[call.stage].backpropagate(PeerId("caller"), bare, receive, lambda _stage, _peer: None)

    def distrust(self, call: Call, peer: PeerId) -> None:
        raise AssertionError(f"a gradient of {peer} was refused")

    def call(self, step: int, index: int, *, evaluation: bool = False) -> Call:
        chance, train = torch.Generator().manual_seed(1000 * step + index), self.manifest.train
        rows = 2, train.microbatch_size, train.sequence_length
        inputs, labels = torch.randint(0, self.manifest.model.vocab_size, rows, generator=chance, dtype=torch.int32).unbind(0)
        if labels_shape(self.manifest, inputs.shape[1]) != labels.shape:  # the inputs, and a token more
            labels = torch.cat([inputs, labels[:, -1:]], 1)
        accumulate = frozenset() if evaluation else frozenset(range(len(self.states)))
        number = step.to_bytes(8, "little") + index.to_bytes(8, "little")
        return Call(
            call_id=number,
            stage=0,
            step=step,
            index=index,
            accumulate=accumulate,
            inputs=encode(inputs),
            labels=encode(labels),
            evaluation=evaluation,
        )

    async def microbatch(self, step: int, index: int, *, evaluation: bool = False) -> CallResult:
        return await self.send(self.call(step, index, evaluation=evaluation), lambda _stage, _peer: None)

    async def train(self, steps: int) -> None:
        """Finish so many steps."""
        for _ in range(steps):
            step = self.states[0].record.step
            for index in range(self.manifest.train.microbatches_per_step):
                await self.microbatch(step, index)
            self.average()
            self.commit()

    def average(self) -> None:
        for state in self.states:
            entry, is_with_parameters = entry_of(state.record), self.manifest.train.average_parameters == "always"
            roster = Roster(state.record.stage, state.record.step, 0, entry.peer, (entry,), averages_parameters=is_with_parameters)
            reason, copy = state.open_round(roster)
            assert copy is not None, reason
            state.take_average(roster, copy)
        ends = (self.states[0], self.states[-1])
        if self.manifest.ties_stages:
            ids = [state.record.average_id for state in ends]
            shares = [state.accumulator.tied_of(state.average.flat_sum) for state in ends if state.average is not None]
            for state, own, other, share in zip(ends, ids, reversed(ids), reversed(shares), strict=True):
                state.take_tied(own, sum_id(*ids), other, share)

    def commit(self) -> None:
        told = [state.record.gradient_norm for state in self.states]
        norm = combine([each for each in told if each is not None]) if None not in told else None
        for state in self.states:
            state.commit(norm, state.record.tied_sum if state.holdings.tied_names else None)
            state.applied = None

    def own(self, stage: int) -> Downloaded:
        state = self.states[stage]
        return Downloaded(state.record.step, state.record.lineage, state.holdings.tensors(state.record), tuple(state.history))

    def take_over(self, given: Life) -> None:
        """Join where another one is."""
        for stage in range(len(self.states)):
            self.load(stage, given.own(stage))

    def load(self, stage: int, found: Downloaded) -> None:
        state = self.states[stage]
        state.begin_joining()
        state.load(found.tensors, found.step, found.lineage, found.history)
        state.serve()

    def keep_checkpoints(self, folder: Path) -> list[CheckpointStore]:
        """Write each stage as it is, and return where it is: a peer keeps those of its own stage only."""
        stores = []
        for stage, state in enumerate(self.states):
            lease = state.holdings.lend(state.record)
            found = Downloaded(state.record.step, state.record.lineage, lease.tensors, tuple(state.history))
            stores.append(CheckpointStore(folder / str(stage), len(self.states)))
            stores[-1].save(stage, found, lease.end)
        return stores

    def hand_on(self, joiner: Life, resumed: Life, folder: Path) -> None:
        """Let another one join where this is, and one resume from its checkpoints."""
        joiner.take_over(self)
        for stage, store in enumerate(self.keep_checkpoints(folder)):
            found = store.load(stage, self.states[stage].record.step)
            assert found is not None
            resumed.load(stage, found)

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu() for state in self.states for name, value in state.holdings.newest.named_parameters()}

    def losses(self) -> list[float]:
        return [entry.loss for entry in self.states[-1].history]

    async def close(self) -> None:
        """Leave: what a daemon does when it pauses or moves."""
        for executor in self.executors:
            executor.close()
            await executor.ended()
        for state in self.states:
            state.release()
        self.states.clear()
        self.services.clear()
