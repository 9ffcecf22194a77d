"""A run of signed microbatches in one process: each stage has a key, signs what it gets and gives, and keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.link.links import Bytes
from peerd.link.peer_keys import public_key_of, verify
from peerd.stage.calls import StageService
from peerd.stage.executor import Executor, Pace
from peerd.stage.state import StageState
from peerd.stage.witnessing import PassWitness, most_kept_bytes
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId, PeerRecord, RunId
from peerd.wire.messages import Call, CallResult
from tests.life import Life
from tests.paper_host import PaperHost
from tests.strategies import view_of

RUN = RunId("a run")
PLENTY = 1 << 40


@dataclass
class Key:
    """One peer's key, as a witness uses it."""

    identity: Identity = field(default_factory=lambda: Identity(Ed25519PrivateKey.generate()))
    run: RunId = RUN

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    @property
    def coins_seed(self) -> bytes:
        return self.sign(b"coins")

    def sign(self, message: bytes) -> bytes:
        return self.identity.sign(message)

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return verify(public_key_of(peer), message, signature)


@dataclass
class SignedLife(Life):
    """The trainer's key is the last one; its calls go to the first stage."""

    keys: list[Key] = field(default_factory=list)
    witnesses: list[PassWitness] = field(default_factory=list)
    falsify: Callable[[Call, CallResult], CallResult] = lambda _call, result: result
    """What a callee makes of its result before it signs it."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        num_stages, most_bytes = self.manifest.train.num_stages, most_kept_bytes(self.manifest, PLENTY)
        self.keys = [Key() for _ in range(num_stages + 1)]
        for stage in range(num_stages):
            record = PeerRecord(peer=self.keys[stage].peer, incarnation=1, stage=stage)
            state = StageState(self.manifest, record, self.device, lambda record=record: view_of(record), self.keep_graph)  # type: ignore[misc]
            state.serve()
            self.states.append(state)
            self.executors.append(Executor())
            self.witnesses.append(PassWitness(state, self.keys[stage], most_bytes))
            service = StageService(self.manifest, state, self.executors[-1], self, Pace(), PaperHost(), witness=self.witnesses[-1])
            self.services.append(service)
        trainer = StageState(self.manifest, PeerRecord(peer=self.keys[-1].peer), self.device, lambda: view_of())
        self.witnesses.append(PassWitness(trainer, self.keys[-1], most_bytes))

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        callee, caller = self.keys[call.stage], self.keys[call.stage - 1]
        on_forwarded(call.stage, callee.peer)
        signed, asked = await self.witnesses[call.stage - 1].asks(call, callee.peer)

        async def receive() -> tuple[Bytes, ...]:
            return (*call.inputs.chunks, *call.labels.chunks)

        bare = replace(signed, inputs=call.inputs.with_chunks(()), labels=call.labels.with_chunks(()))
        result = await self.services[call.stage].backpropagate(caller.peer, bare, receive, lambda _stage, _peer: None)
        result = self.falsify(call, result)
        await self.witnesses[call.stage - 1].took(signed, asked, result)
        return result
