"""Copies of what this peer's mates have done in local steps: a run can be computed again although a disk is lost.

After each average, and as soon as a mate's record shows an update of its own, a peer asks some mates for their moves since it last
asked, and writes them beside its own. A move has a hash of itself and of those before it, so a copy is the beginning of its author's
log, or is refused. What a peer has done since its record last showed an update is with nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from peerd.background import Tasks
from peerd.errors import RemoteError
from peerd.policy.step.copying import DueCopies, whose_to_copy
from peerd.stage.moves import MoveCopy, beginning_of, name_of
from peerd.table.record import PeerId, PeerRecord
from peerd.wire.clients import AveragingClient
from peerd.wire.messages import ToldMoves

if TYPE_CHECKING:
    from peerd.daemon.seat import Seat

MOST_ASKED = 8
"""Times that a mate is asked after an average."""
LOOK_S = 1.0
"""The longest time between two looks at the records of mates; every change of one wakes."""
LOG = structlog.get_logger()
Ask = Callable[[PeerId, int, int], Awaitable[ToldMoves]]
"""Asks a mate for its moves, from a number on, if its log is of this incarnation."""


def copies_of(seat: Seat, averaging: AveragingClient, timeout_s: float) -> MoveCopies | None:
    """None where no moves are written. `timeout_s`: of a question."""
    settings, train = seat.peer.settings, seat.peer.place.manifest.train
    if not (settings.moves and train.local_batch):
        return None
    ask = partial(averaging.get_moves, timeout_s=timeout_s)
    copies = MoveCopies(Path(settings.moves), seat.state.record.peer, seat.stage, ask)
    membership = seat.peer.membership
    copies.follow(partial(membership.changed, LOOK_S), lambda: membership.live().of_stage(seat.stage))
    return copies


class MoveCopies:
    """The copies that one peer keeps while it serves a stage."""

    def __init__(self, folder: Path, me: PeerId, stage: int, ask: Ask) -> None:
        self._folder, self._me, self._stage, self._ask = folder, me, stage, ask
        self._copies: dict[PeerId, tuple[int, MoveCopy]] = {}
        """By peer, the incarnation with which it began its log, and the copy."""
        self._tasks = Tasks()
        self._fetching: asyncio.Task[None] | None = None
        self._asks = asyncio.Lock()
        """Moves are asked for by one task at a time: a copy takes each of them once."""

    def fetch(self, peers: Collection[PeerId]) -> None:
        """Ask for what is new, unless this peer still does. `peers`: those whose changes are in the last average."""
        if self._fetching is None or self._fetching.done():
            self._fetching = self._tasks.start(self._fetch(whose_to_copy(self._me, peers)))

    def follow(self, changed: Callable[[], Awaitable[object]], mates: Callable[[], Iterable[PeerRecord]]) -> None:
        """From now on, ask mates whose records show an update of their own. `changed` waits for other records, not for ever."""
        self._tasks.start(self._follow(changed, mates))

    async def close(self) -> None:
        await self._tasks.close()

    async def _follow(self, changed: Callable[[], Awaitable[object]], mates: Callable[[], Iterable[PeerRecord]]) -> None:
        copies = DueCopies(self._me)
        while True:
            await changed()
            await self._fetch(copies.due(mates()))

    async def _fetch(self, peers: Sequence[PeerId]) -> None:
        async with self._asks:
            for peer in filter(_names_a_file, peers):
                try:
                    for _ in range(MOST_ASKED):
                        if not await self._goes_on(peer):
                            break
                except RemoteError as error:
                    LOG.debug("moves not copied", peer=peer, reason=error.message)

    async def _goes_on(self, peer: PeerId) -> bool:
        """Ask a mate once. Returns whether it may have more to tell."""
        incarnation, copy = self._copies.get(peer, (0, None))
        told = await self._ask(peer, incarnation, copy.num_moves if copy is not None else 0)
        if not told.incarnation:
            return False
        if copy is None or told.incarnation != incarnation:
            copy = await asyncio.to_thread(self._opened, peer, told.incarnation)
            self._copies[peer] = told.incarnation, copy
            if copy.num_moves != told.first:  # it is in the file that was here, or too long ago
                return told.first < copy.num_moves
        if told.first != copy.num_moves or not told.lines:
            return False
        await asyncio.to_thread(copy.add, told.first, told.lines)
        return True

    def _opened(self, peer: PeerId, incarnation: int) -> MoveCopy:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{name_of(peer, incarnation, self._stage)}.kept-by-{self._me}.jsonl"
        return MoveCopy(self._folder / name, beginning_of(peer, incarnation, self._stage))


def _names_a_file(peer: PeerId) -> bool:
    return peer.isascii() and peer.isalnum()
