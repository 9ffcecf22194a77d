"""Gives each member of a round another sum of its slice, and signs each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from blake3 import blake3

from peerd.averaging.exchange import Exchange
from peerd.daemon.peer import Peer
from peerd.policy.step.certificates import SignedSlice
from peerd.wire.messages import Frame

FURTHER = 0.01
"""Each member's numbers are so much larger than those of the one before it."""


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    true_frame, told = Exchange.frame, dict[tuple[int, int], dict[int, bytes]]()

    async def frame(self: Exchange, slice_number: int, author: int, number: int, to: int, is_carried: bool = False) -> Frame | None:
        found = await true_frame(self, slice_number, author, number, to, is_carried)
        if found is None or not found.is_sum or slice_number != self.me:
            return found
        false = (np.frombuffer(b"".join(found.chunks), np.float64) + FURTHER * (1 + to)).tobytes()
        chunks = told.setdefault((id(self), to), {})
        chunks[number] = false
        found = replace(found, chunks=(false,), slice_signature=b"")
        if number == self.layout.chunks_of(self.me) - 1:
            root = blake3(b"".join(chunks[each] for each in range(number + 1))).digest()
            bare = SignedSlice(peer.membership.me, root, b"")
            text = bare.statement(peer.membership.run, self.roster.average_id)
            found = replace(found, slice_signature=peer.membership.identity.sign(text))
        return replace(found, signature=peer.membership.identity.sign(self._text_of(found)))

    setattr(Exchange, "frame", frame)  # noqa: B010 - it is a lie
