"""What audits need of the peer around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from peerd.table.record import PeerId, RunId
from peerd.table.view import LiveView


class AuditHost(Protocol):
    """The peer that audits."""

    @property
    def run(self) -> RunId: ...

    @property
    def me(self) -> PeerId: ...

    @property
    def coins_seed(self) -> bytes:
        """The seed of this peer's coins, which nobody else knows."""

    @property
    def patience_s(self) -> float:
        """The longest silence of another peer in a call."""

    def sign(self, message: bytes) -> bytes: ...

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool: ...

    def live(self) -> LiveView: ...

    def pass_s(self) -> float:
        """How long a microbatch takes in all stages, in seconds."""

    async def keep_cases(self) -> None:
        """Write the convictions and who stands to the home, as far as the disk takes them."""

    def cast_out(self, peers: Sequence[PeerId]) -> None:
        """Let peers that have lost their standing count for nothing, and refuse their calls. Called again and again."""
