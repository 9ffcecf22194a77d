"""Computes rightly, and falsifies what it sends on and gives back: activations and gradients, times a factor, or noise as large as they."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from peerd.daemon.peer import Peer
from peerd.policy.step.receipts import SignedPass
from peerd.stage.witnessing import PassWitness, ReceivedPass
from peerd.table.record import PeerId
from peerd.wire.dispatch import Dispatcher
from peerd.wire.messages import Call, CallResult, TensorBytes
from peerd.wire.tensors import decode, encode

FACTOR = -1.0


async def lie(_peer: Peer, arguments: Mapping[str, Any]) -> None:
    factor, is_noise = float(arguments.get("factor", FACTOR)), bool(arguments.get("noise"))
    true_answers, true_send = PassWitness.answers, Dispatcher.send

    def false(value: TensorBytes) -> TensorBytes:
        true = decode(value, torch.device("cpu"))
        return encode(factor * (torch.randn_like(true) * true.std() if is_noise else true), value.codec)

    async def answers(self: PassWitness, given: ReceivedPass, result: CallResult, below: SignedPass | None) -> CallResult:
        if result.gradient is not None:
            result = replace(result, gradient=await asyncio.to_thread(false, result.gradient))
        return await true_answers(self, given, result, below)

    async def send(self: Dispatcher, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        if call.stage and not call.evaluation:
            call = replace(call, inputs=await asyncio.to_thread(false, call.inputs))
        return await true_send(self, call, on_forwarded)

    setattr(PassWitness, "answers", answers)  # noqa: B010 - it is a lie
    setattr(Dispatcher, "send", send)  # noqa: B010
