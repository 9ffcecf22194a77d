"""Rule J2 (download), the joiner's side: download a stage's state from its peers, as one snapshot in hashed chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import structlog

from peerd.errors import BadMessageError, BusyError, PeerGoneError, RemoteError, StageError, WrongStateError
from peerd.policy.route.admission import MOST_DONORS, donors, givers_of_start
from peerd.stage.gathering import Gathering
from peerd.stage.partial_state import PartialState
from peerd.stage.snapshots import Downloaded
from peerd.stage.spool import Spools
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.wire.messages import Snapshot, StateRequest
from peerd.wire.state_client import StateClient

LOG = structlog.get_logger()
LOOK_S = 1.0
"""How often a download looks for more donors."""
LEAST_WAIT_S = 1.0
"""The shortest pause before a donor that is busy is asked again."""
SKETCH_AGAIN_S = 0.2
"""The shortest pause before a peer is asked for a sketch again."""
Candidates = Callable[[LiveView, frozenset[PeerId]], list[PeerRecord]]
MostBytes = Callable[[int, bool], int]
"""How large the state of a stage can be; with True, that of its copy of a tied weight alone (`most_state_bytes`)."""


@dataclass(frozen=True, slots=True)
class SketchAnswer:
    """What a peer answers that is asked for the sketch of its state."""

    told: tuple[int, bytes] | None
    """Its step, and the sums."""
    again_s: float
    """For how long it is not asked again."""
    is_busy: bool = False
    """It tells none now, and will later."""


class Downloader:
    """Downloads a stage's state from its peers, of several at once. If one fails, others send what it had left."""

    def __init__(
        self,
        client: StateClient,
        membership: Membership,
        most_bytes: MostBytes,
        patience_s: float,
        spools: Spools | None = None,
        *,
        certifies: bool = False,
    ) -> None:
        """`spools`: where a state lies until it is loaded; by default in memory. `certifies`: whether the run does (rule 18)."""
        self._certifies = certifies
        self._client = client
        self._membership = membership
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self._spools = spools or Spools()
        self._partial = PartialState(0, 0)
        """The last download, or the one under way."""
        self._began_s, self._bytes_before = 0.0, 0
        """When the last download began, and what an earlier one had left of it."""
        self._ended_s: float | None = 0.0
        """When it ended; None: it is under way."""
        self.previous_s = 0.0
        """How long the previous parameters would take to download, by the last download."""
        self.givers: frozenset[PeerId] = frozenset()
        """Those that offered what the last download has brought."""
        self._distrusted_until_s: dict[PeerId, float] = {}
        self._unfinished: PartialState | None = None
        """What came of the last download, if that failed just now: the line may be back soon, and the donor keeps the copy for as long."""

    @property
    def bytes_done(self) -> int:
        return self._partial.bytes_done

    @property
    def bytes_total(self) -> int:
        """0 until a donor has told it."""
        return self._partial.landing.num_bytes

    @property
    def rate(self) -> float | None:
        """Bytes per second of the download under way, or of the last one; None: nothing has come."""
        took_s = (clock_s() if self._ended_s is None else self._ended_s) - self._began_s
        came = self._partial.bytes_done - self._bytes_before
        return came / took_s if came > 0 and took_s > 0 else None

    @property
    def step(self) -> int | None:
        """The step of the state whose download is under way; None: none is, or its donors have not told it yet."""
        header = self._partial.header
        return None if self._ended_s is not None or header is None else header.step

    async def download(
        self, stage: int, prefer: PeerId | None = None, tied_only: bool = False, begun: Callable[[Snapshot], object] | None = None
    ) -> Downloaded:
        """Download the state of a stage from its peers, from `prefer` first. Raises StageError if no donor can give it.

        `begun` is told each snapshot that is chosen: its hashes bind the donor.
        """
        partial = await self._begun(stage, tied_only)
        if self._unfinished is not None and (self._unfinished.stage, self._unfinished.tied_only) == (stage, tied_only):
            partial = self._unfinished
        self._unfinished, partial.begun = None, begun
        if begun is not None and partial.header is not None:
            begun(partial.header)
        try:
            found = await self._download(partial, self._donors_of(stage), prefer)
        except StageError:
            self._keep(partial)
            raise
        if partial.header is not None and partial.landing.num_bytes:
            self.previous_s = (clock_s() - self._began_s) * partial.header.previous_bytes / partial.landing.num_bytes
        return found

    async def sketch(self, peer: PeerId, stage: int, seed: bytes, previous: bool = False) -> SketchAnswer:
        """Ask a peer for the sketch of the state that it holds, or of the previous parameters."""
        try:
            told = await self._client.sketch(peer, stage, seed, previous, self._patience_s)
            return SketchAnswer((told.step, told.sums), SKETCH_AGAIN_S)
        except BusyError as error:
            return SketchAnswer(None, max(SKETCH_AGAIN_S, error.retry_after_s), is_busy=True)
        except RemoteError as error:
            LOG.debug("a peer did not tell what state it holds", peer=peer, error=error.message)
            return SketchAnswer(None, SKETCH_AGAIN_S)

    def is_of_most(self, stage: int) -> bool:
        """Whether more than half of a stage have offered what the last download brought; where the run does not certify, always."""
        return not self._certifies or 2 * len(self.givers) > len(self._membership.live().serving(stage))

    def distrust(self, donors: Collection[PeerId], for_s: float) -> None:
        """Ask these for a state only where there are no others: what they gave was not the state of their stage."""
        self._distrusted_until_s |= dict.fromkeys(donors, clock_s() + for_s)

    def _keep(self, partial: PartialState) -> None:
        """Let a download that begins soon go on with this one."""
        self._unfinished = partial
        asyncio.get_running_loop().call_later(self._patience_s, self._forget, partial)

    def _forget(self, partial: PartialState) -> None:
        if self._unfinished is partial:
            self._unfinished = None

    async def find_donor(
        self, stage: int, prefer: PeerId, is_of_use: Callable[[Snapshot], bool], claims: Callable[[PeerRecord], bool]
    ) -> PeerId:
        """Return a peer that shows the header of a state of use, or is busy with other downloads.

        If there is none, those whose records claim one do not count for a while (hole 32). Raises StageError.
        """
        others = [record.peer for record in self._donors_of(stage)(self._membership.live(), frozenset())]
        for donor in dict.fromkeys((prefer, *others)):
            if self._membership.live().find(donor) is None:
                continue  # it has ceased to count meanwhile
            try:
                async with self._client.open(donor, StateRequest(stage=stage), self._patience_s) as opened:
                    header = opened.header
                partial = await self._begun(stage)
                await asyncio.to_thread(partial.check, header)
            except BusyError:
                return donor
            except RemoteError:
                continue
            if is_of_use(header):
                partial.begin(header)
                self._keep(partial)
                return donor
        for record in self._membership.live().serving(stage):
            if claims(record):
                self._membership.doubt(record.peer)
        raise StageError(f"no peer of stage {stage} gives a newer state", "it is asked for again while peers claim to have one")

    async def download_start(self, stage: int) -> Downloaded:
        """Download the stage's part of the state that the run begins from. Raises StageError if nobody can give it."""
        return await self._download(await self._begun(stage), givers_of_start, None)

    async def download_previous(self, stage: int, prefer: PeerId) -> Downloaded:
        """Download the parameters of the step before that of the state which the stage's peers give now; no tensors if they have none.

        Raises StageError if no donor can give it.
        """
        partial = replace(await self._begun(stage), of_previous=True)
        return await self._download(partial, self._donors_of(stage), prefer)

    def _donors_of(self, stage: int) -> Candidates:
        def trusted(live: LiveView, tried: frozenset[PeerId]) -> list[PeerRecord]:
            able = donors(live, stage, tried, self._certifies)
            return [r for r in able if self._distrusted_until_s.get(r.peer, 0.0) <= clock_s()] or able

        return trusted

    async def _begun(self, stage: int, tied_only: bool = False) -> PartialState:
        return PartialState(stage, await asyncio.to_thread(self._most_bytes, stage, tied_only), tied_only, spools=self._spools)

    async def _download(self, partial: PartialState, candidates: Candidates, prefer: PeerId | None) -> Downloaded:
        """Ask several donors at once, others when one fails, and one whose connection broke again, as long as it sends more each time.

        A donor that is busy says for how long. While all others fail, this peer waits for it, and then asks all of them again. Where no
        donor gives the snapshot that was begun with any more, but others give another one, the download begins anew with that.
        """
        self._partial, self._began_s, self._bytes_before, self._ended_s = partial, clock_s(), partial.bytes_done, None
        try:
            return await self._of_donors(partial, candidates, prefer)
        finally:
            self._ended_s = clock_s()

    async def _of_donors(self, partial: PartialState, candidates: Candidates, prefer: PeerId | None) -> Downloaded:
        tried, agreeing = Tried(), set[PeerId]()
        while True:
            gathering = Gathering(lambda donor: self._client.open(donor, partial.request, self._patience_s), partial)
            try:
                while not partial.is_complete and await self._gather(gathering, tried, candidates, prefer):
                    pass
            finally:
                await gathering.close()
                agreeing |= gathering.agreeing
            if partial.header is not None and partial.is_complete:
                try:
                    found = await asyncio.to_thread(partial.whole, partial.header)
                    self.givers = frozenset(agreeing)
                    return found
                except BadMessageError as error:
                    tried.failed |= gathering.givers
                    tried.last_error = error.message
            elif not tried.others:
                told = f"the state of stage {partial.stage} cannot be downloaded: {tried.last_error}"
                raise StageError(told, "wait for another of its peers and join again")
            partial.start_over()
            agreeing.clear()
            tried.others.clear()

    async def _gather(self, gathering: Gathering[Snapshot], tried: Tried, candidates: Candidates, prefer: PeerId | None) -> bool:
        """Ask those donors that can be asked now, and wait for news. Returns False once no donor gives this snapshot any more."""
        live = self._membership.live()
        able = [r for r in candidates(live, frozenset(tried.failed)) if r.peer not in tried.failed | tried.others]
        ready = [r for r in able if not tried.is_busy(r.peer)]
        ready.sort(key=lambda r: (r.peer not in gathering.donors, r.peer != prefer))
        for record in ready[:MOST_DONORS]:
            if record.peer not in gathering.donors:
                if tried.busy_until_s.pop(record.peer, None) is not None:
                    tried.failed.clear()
                gathering.ask(record.peer)
        if not gathering.donors:
            if able:
                await self._membership.changed(min(tried.busy_until_s[r.peer] for r in able) - clock_s())
            return bool(able)
        for donor, error in (await gathering.ended(LOOK_S)).items():
            tried.note(donor, error, gave=donor in gathering.givers, has_begun=gathering.has_chosen)
        return True


@dataclass(slots=True)
class Tried:
    """What the donors of one download have come to."""

    failed: set[PeerId] = field(default_factory=set)
    others: set[PeerId] = field(default_factory=set)
    """Those that give another snapshot."""
    busy_until_s: dict[PeerId, float] = field(default_factory=dict)
    last_error: str = "nobody serves it"

    def is_busy(self, donor: PeerId) -> bool:
        return self.busy_until_s.get(donor, 0.0) > clock_s()

    def note(self, donor: PeerId, error: RemoteError | None, *, gave: bool, has_begun: bool) -> None:
        """A donor's stream has ended. `gave`: it has given chunks before that; `has_begun`: a snapshot was chosen."""
        if error is None:
            return
        self.last_error = f"{donor}: {error.message}"
        if isinstance(error, BadMessageError):
            LOG.warning("what a donor gives of the state is wrong: others are asked for it", donor=donor, error=error.message)
        if isinstance(error, BusyError) and error.retry_after_s:
            self.busy_until_s[donor] = clock_s() + max(error.retry_after_s, LEAST_WAIT_S)
        elif isinstance(error, WrongStateError) and has_begun:
            self.others.add(donor)
        elif not (isinstance(error, PeerGoneError) and gave):  # else the connection broke
            self.failed.add(donor)
