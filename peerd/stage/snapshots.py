"""Rule J2 (download), the donor's side: serve a stage's state as an immutable snapshot in hashed chunks."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from blake3 import blake3
from torch import Tensor

from peerd.background import start
from peerd.errors import BusyError, NotFiniteError, PeerdError, WrongStateError
from peerd.policy.step.following import Followers
from peerd.policy.step.sketching import MAKING_S, SketchTurns
from peerd.stage.executor import Executor, Priority
from peerd.stage.history import HistoryEntry, history_json
from peerd.stage.leases import Lease
from peerd.stage.parameters import is_finite_state
from peerd.stage.spool import Spools, StoredState, split_off_previous, stored_bytes
from peerd.stage.state import StageState
from peerd.stage.state_file import OpenFile
from peerd.swarm.clock import clock_s
from peerd.table.record import Lineage, PeerId, Phase
from peerd.wire.chunks import CutFile
from peerd.wire.deliveries import Lending
from peerd.wire.messages import Snapshot, StateRequest, ToldSketch
from peerd.wire.tensors import file_of

LOG = structlog.get_logger()
SENT_HISTORY = 10_000
MOST_COPIES = 2
"""Copies of its state that a peer keeps for those who download it: the newest, and one that another joiner has begun with."""
SHARED_STEPS = 2
"""A joiner that no copy can be made for gets one that is so many steps old. The averages since then are kept for an earlier joiner."""
WAIT_SHARE, ASK_AGAIN_S = 0.5, 1.0
"""Copies and sketches are made between two passes, which may take minutes. A joiner waits for this share of its patience, and then asks
again."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Downloaded:
    """A copy of a stage's state: downloaded, read from disk, or taken from this peer's own."""

    step: int
    lineage: Lineage
    tensors: Mapping[str, Tensor]
    history: tuple[HistoryEntry, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """What a snapshot is of. Without a lineage it is the stage's part of the state that the run begins from."""

    stage: int
    lineage: Lineage | None = None
    step: int = 0
    tied_only: bool = False

    def is_near(self, key: Key) -> bool:
        """Whether a joiner that wants the snapshot of `key` can do with this older one."""
        is_alike = (self.stage, self.tied_only, self.lineage is None) == (key.stage, key.tied_only, key.lineage is None)
        return is_alike and 0 <= key.step - self.step <= SHARED_STEPS

    @property
    def has_followers(self) -> bool:
        """Whether the receiver needs the averages since then."""
        return self.lineage is not None and not self.tied_only


@dataclass(frozen=True, slots=True)
class _Copy:
    """A snapshot that may still be on its way to somebody."""

    key: Key
    header: Snapshot
    file: weakref.ReferenceType[CutFile]
    lendings: weakref.WeakKeyDictionary[Lending, PeerId] = field(default_factory=weakref.WeakKeyDictionary)
    """With those to whom it is lent."""
    broken: dict[PeerId, asyncio.TimerHandle] = field(default_factory=dict)
    """Those whose stream broke, and what keeps the file for each until it may have come back."""

    @property
    def left_s(self) -> float | None:
        """The time until nobody needs it any more; None while that is not known."""
        known = [lending.left_s for lending in self.lendings]
        return None if None in known else max((left_s for left_s in known if left_s is not None), default=None)

    def lent(self) -> list[Lending]:
        """What somebody reads of it just now."""
        return [lending for lending in self.lendings if not lending.is_over]

    def readers(self) -> set[PeerId]:
        """Those for whom it is kept."""
        return {*self.broken, *(self.lendings[lending] for lending in self.lent())}

    def broke(self, caller: PeerId, patience_s: float) -> None:
        """A joiner goes on where it stopped, if it comes back soon. The file is kept until then."""
        self._forget(caller)
        if (file := self.file()) is not None:
            self.broken[caller] = asyncio.get_running_loop().call_later(patience_s, self._forget, caller, file)

    def _forget(self, caller: PeerId, _file: CutFile | None = None) -> None:
        if (timer := self.broken.pop(caller, None)) is not None:
            timer.cancel()

    def take_back(self) -> None:
        for lending in self.lent():
            lending.take_back()
        for caller in list(self.broken):
            self._forget(caller)


@dataclass(frozen=True, slots=True)
class _Lent:
    """This peer's own state, and a file for its copy."""

    state: Downloaded
    lease: Lease
    file: OpenFile

    def stored(self) -> Downloaded:
        """Write the copy. Raises OSError."""
        try:
            return replace(self.state, tensors=StoredState(self.file, self.state.tensors))
        finally:
            self.lease.end()


class SnapshotServer:
    """Answers GET_STATE. Joiners of one step share one snapshot, and share one copy of the state with its checkpoint and export.

    There are at most MOST_COPIES: while so many are being sent, a joiner gets one of them, or hears when to ask again.
    """

    def __init__(
        self,
        state: StageState,
        executor: Executor,
        followers: Followers,
        patience_s: float,
        start: Callable[[int], Downloaded] | None = None,
        spools: Spools | None = None,
    ) -> None:
        """`start` reads a stage's part of the state that the run begins from; None if this peer does not hold that state.

        `spools`: where copies lie; by default in memory.
        """
        self._state = state
        self._executor = executor
        self._followers = followers
        self._patience_s = patience_s
        self._start = start
        self._spools = spools or Spools()
        self._kept: tuple[Downloaded, CutFile] | None = None
        """The newest; it is dropped when this peer commits."""
        self._copies: list[_Copy] = []
        """Oldest first."""
        self._whole: weakref.ReferenceType[Downloaded] | None = None
        """The last copy of the whole state, while it is in use."""
        self._making = asyncio.Lock()
        self._sketching = SketchTurns()
        self._sketches: dict[tuple[PeerId, int, bytes, bool], asyncio.Task[ToldSketch]] = {}
        """By who has asked for what, until it is told or nobody comes for it."""
        self._under_way: dict[tuple[int, bool, bool], asyncio.Task[tuple[_Copy, CutFile]]] = {}
        """By stage and kind, the making of a copy, until somebody has taken it."""

    async def snapshot(self, caller: PeerId, wanted: StateRequest) -> tuple[Snapshot, Lending]:
        record, stage = self._state.record, wanted.stage
        gives_start = record.stage != stage or record.phase is Phase.JOINING
        if gives_start and self._start is None:
            raise WrongStateError(f"this peer cannot give the state of stage {stage}")
        key = Key(stage) if gives_start else Key(stage, record.lineage, record.step, wanted.tied_only)
        self._begin(caller, key)  # from now on, as the stage may finish steps while the copy is made
        try:
            copy, file = self._find(key, wanted) or await self._made_in_time(key)
            lending = Lending(file, self._patience_s, partial(self._ended, caller, copy))
            self._begin(caller, copy.key)
        finally:
            self._end(caller, key)
        copy.lendings[lending] = caller
        return copy.header, lending

    def _ended(self, caller: PeerId, copy: _Copy, is_broken: bool) -> None:
        self._end(caller, copy.key)
        if is_broken:
            copy.broke(caller, self._patience_s)

    def _begin(self, caller: PeerId, key: Key) -> None:
        if key.has_followers:
            self._followers.began(caller, key.step, clock_s())

    def _end(self, caller: PeerId, key: Key) -> None:
        if key.has_followers:
            self._followers.ended(caller, clock_s(), self._patience_s)

    def _find(self, key: Key, wanted: StateRequest) -> tuple[_Copy, CutFile] | None:
        """The snapshot that is named, otherwise that of this key. Raises WrongStateError if it is named, and cannot be made any more."""
        if wanted.snapshot:
            named = self._newest(lambda copy: identity_of(copy.header.chunk_hashes) == wanted.snapshot)
            if named is not None:
                return named
            if key.lineage is not None and key.step != wanted.step:
                raise WrongStateError(f"this peer is at step {key.step}, and holds no copy of step {wanted.step}")
        return self._newest(lambda copy: copy.key == key)

    def _newest(self, fits: Callable[[_Copy], bool]) -> tuple[_Copy, CutFile] | None:
        return next((each for each in reversed(self._alive()) if fits(each[0])), None)

    def _alive(self) -> list[tuple[_Copy, CutFile]]:
        found = [(copy, file) for copy in self._copies if (file := copy.file()) is not None]
        self._copies = [copy for copy, _ in found]
        return found

    async def _made_in_time(self, key: Key) -> tuple[_Copy, CutFile]:
        """Make a copy, or take one that was made for whoever asks next. Raises BusyError if that takes long; it is made all the same."""
        kind, is_new = (key.stage, key.tied_only, key.lineage is None), False
        if kind not in self._under_way:
            self._under_way[kind], is_new = start(self._make_or_share(key), expects=(PeerdError,)), True
        making = self._under_way[kind]
        await asyncio.wait({making}, timeout=WAIT_SHARE * self._patience_s)
        if not making.done():
            making.add_done_callback(lambda _done: asyncio.get_running_loop().call_later(self._patience_s, self._give_up, kind, making))
            raise BusyError("this peer copies its state as soon as the pass under way is over", ASK_AGAIN_S)
        self._give_up(kind, making)
        if not is_new and not making.cancelled() and (making.exception() or making.result()[0].key.step < key.step - SHARED_STEPS):
            return await self._made_in_time(key)
        return making.result()

    def _give_up(self, kind: tuple[int, bool, bool], making: asyncio.Task[tuple[_Copy, CutFile]]) -> None:
        if self._under_way.get(kind) is making:
            del self._under_way[kind]

    async def _make_or_share(self, key: Key) -> tuple[_Copy, CutFile]:
        async with self._making:
            return self._newest(lambda copy: copy.key == key) or await self._make_or_share_now(key)

    async def _make_or_share_now(self, key: Key) -> tuple[_Copy, CutFile]:
        self._kept = None  # it goes now, unless it is on its way to somebody
        near = self._newest(lambda copy: copy.key.is_near(key))
        if near is None:
            self._take_back()
        if len(self._alive()) < MOST_COPIES:
            return await self._make(key)
        if near is None:
            left_s = min(self._patience_s if copy.left_s is None else copy.left_s for copy in self._copies)
            raise BusyError(f"this peer gives its state to others already, and keeps at most {MOST_COPIES} copies of it", left_s)
        return near

    def _take_back(self) -> None:
        """Give up a copy that somebody keeps from others, if there are as many as may be (hole 83).

        First one that is lent to nobody but to callers that read the newer one as well; otherwise one whose readers have had their time.
        """
        if len(alive := self._alive()) < MOST_COPIES:
            return
        copies = [copy for copy, _ in alive]
        newer = [set[PeerId]().union(*(other.readers() for other in copies[place + 1 :])) for place in range(len(copies))]
        of_two = (copy for copy, others in zip(copies, newer, strict=True) if (readers := copy.readers()) and readers <= others)
        slow = (copy for copy in copies if (lent := copy.lent()) and all(lending.has_had_its_time for lending in lent))
        if (going := next(of_two, None) or next(slow, None)) is not None:
            going.take_back()

    async def _make(self, key: Key) -> tuple[_Copy, CutFile]:
        if key.lineage is None and self._start is not None:  # `snapshot` has refused what this peer does not hold
            found = await asyncio.to_thread(self._start, key.stage)
        else:
            found = await self._own(key.tied_only)
            key = Key(key.stage, found.lineage, found.step, key.tied_only)
        header, file = await asyncio.to_thread(_as_snapshot, found, key.tied_only)
        if key.lineage is not None:
            self._kept = found, file
        self._copies.append(_Copy(key, header, weakref.ref(file)))
        return self._copies[-1], file

    async def own(self) -> Downloaded:
        """This peer's own state, as a joiner would get it."""
        return await self._own(tied_only=False)

    async def sketch(self, asker: PeerId, stage: int, seed: bytes, previous: bool = False) -> ToldSketch:
        """The sketch of this peer's state, or of the previous parameters, under a joiner's seed.

        Sketches take a small share of the time, however many joiners ask, and each of these gets its turn. Raises BusyError until it has
        come, and while the sketch takes long to make: who asks for the same one again gets it.
        """
        key = asker, stage, seed, previous
        if key not in self._sketches:
            if (wait_s := self._sketching.wait_s(asker, clock_s())) > 0:
                raise BusyError("this peer tells others of its state just now", wait_s)
            self._sketching.begins()
            # The task outlives the call: a caller that hangs up must not get another sketch made before the time of this one is counted.
            self._sketches[key] = start(self._make_sketch(stage, seed, previous), expects=(PeerdError,))
            self._sketches[key].add_done_callback(
                lambda made: asyncio.get_running_loop().call_later(self._patience_s, self._forget_sketch, key, made)
            )
        making = self._sketches[key]
        await asyncio.wait({making}, timeout=WAIT_SHARE * self._patience_s)
        if not making.done():
            raise BusyError("this peer makes the sketch as soon as the pass under way is over", MAKING_S)
        self._forget_sketch(key, making)
        return making.result()

    def _forget_sketch(self, key: tuple[PeerId, int, bytes, bool], made: asyncio.Task[ToldSketch]) -> None:
        if self._sketches.get(key) is made:
            del self._sketches[key]

    async def _make_sketch(self, stage: int, seed: bytes, previous: bool) -> ToldSketch:
        took_s = 0.0

        def timed() -> ToldSketch:
            nonlocal took_s
            began_s = clock_s()
            try:
                return self._sketch(stage, seed, previous)
            finally:
                took_s = clock_s() - began_s

        try:
            return await self._executor.run(Priority.LEDGER, timed)
        finally:
            self._sketching.took(took_s, clock_s())

    def _sketch(self, stage: int, seed: bytes, previous: bool) -> ToldSketch:
        record = self._state.record
        if record.stage != stage or record.phase is Phase.JOINING:
            raise WrongStateError(f"this peer holds no state of stage {stage}")
        if previous and self._state.holdings.previous is None:
            raise WrongStateError("this peer does not hold the parameters of the step before")
        return ToldSketch(record.step, self._state.holdings.sketch(record, seed, previous).to_bytes())

    def forget(self) -> None:
        """Drop the kept snapshot. Called after a commit, so that the next joiner gets the new step."""
        self._kept = None

    async def _own(self, tied_only: bool) -> Downloaded:
        taken = await self._executor.run(Priority.LEDGER, lambda: self._take(tied_only))
        try:
            found = await asyncio.to_thread(taken.stored) if isinstance(taken, _Lent) else taken
        except OSError as error:
            LOG.warning("the disk fails: a copy of the state lies in memory", error=str(error))
            found = await self._executor.run(Priority.LEDGER, self._copied)
        if not tied_only:
            self._whole = weakref.ref(found)
        return found

    def _take(self, tied_only: bool) -> Downloaded | _Lent:
        """A copy of the state, or the state itself, which has to be stored at once: the commit waits for that."""
        state, whole = self._state, self._whole() if self._whole is not None else None
        held, record, history = state.holdings, state.record, tuple(state.history)
        if tied_only:
            return Downloaded(record.step, record.lineage, held.tied_tensors(record), history)
        if whole is not None and (whole.step, whole.lineage) == (record.step, record.lineage):
            return whole
        lease = held.lend(record)
        file = self._spools.file(stored_bytes(lease.tensors))
        if file is not None:
            return _Lent(Downloaded(record.step, record.lineage, lease.tensors, history), lease, file)
        lease.end()
        return self._copied()

    def _copied(self) -> Downloaded:
        record = self._state.record
        return Downloaded(record.step, record.lineage, self._state.holdings.tensors(record), tuple(self._state.history))


def identity_of(chunk_hashes: Sequence[bytes]) -> bytes:
    """The hash that identifies a snapshot."""
    return blake3(b"".join(chunk_hashes)).digest()


def _as_snapshot(state: Downloaded, tied_only: bool) -> tuple[Snapshot, CutFile]:
    """A snapshot. A joiner hardly ever needs the previous parameters, so they are a file of their own at its end."""
    if not is_finite_state(state.tensors):
        raise NotFiniteError("the run has diverged: this peer's parameters are not finite")
    if isinstance(state.tensors, StoredState):
        file, previous_bytes = state.tensors.cut(), state.tensors.previous_bytes
    else:
        main, previous = (state.tensors, {}) if tied_only else split_off_previous(state.tensors)
        last = file_of(previous) if previous else ()
        file, previous_bytes = CutFile((*file_of(main), *last)), sum(map(len, last))
    header = Snapshot(
        step=state.step,
        lineage=state.lineage,
        num_bytes=file.num_bytes,
        chunk_hashes=file.hashes(),
        metadata=history_json(state.history[-SENT_HISTORY:]),
        previous_bytes=previous_bytes,
    )
    return header, file
