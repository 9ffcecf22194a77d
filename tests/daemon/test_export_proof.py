"""An export of a certified run compares each stage's state with those of the stage's other peers: rule 21 (prove). Its parts are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.daemon import export
from peerd.daemon.comparing import Compared
from peerd.errors import BusyError, TimedOutError, WrongStateError
from peerd.policy.step.following import Followers
from peerd.policy.step.proving import Acceptance, Opinion, StateVerdict
from peerd.stage import download
from peerd.stage.download import Downloader
from peerd.stage.executor import Executor
from peerd.stage.snapshots import SnapshotServer
from peerd.stage.state import StageState
from peerd.stage.state_bytes import most_state_bytes
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.wire.chunk_streams import Offer
from peerd.wire.messages import Snapshot, StateRequest, ToldSketch
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest
from tests.wire.lent import Lent

TINY = tiny_manifest(2)
MANIFEST = replace(TINY, swarm=replace(TINY.swarm, trust="on"))
LIAR = "a"
STEP = 5
FALSE = "waiting: most peers of stage 1 hold another state than a gave"


class Donor:
    """A peer that serves the last stage. `off`: by so much its parameters are off those of an honest one."""

    def __init__(self, swarm: Swarm, name: str, off: float) -> None:
        record = PeerRecord(peer=PeerId(name), stage=1)
        self.state = StageState(MANIFEST, record, torch.device("cpu"), swarm.live)
        self.state.serve()
        with torch.no_grad():
            for parameter in self.state.holdings.module.parameters():
                parameter.mul_(1.0 + off)
        self.go_on_to(STEP)
        self.executor = Executor()
        self.snapshots = SnapshotServer(self.state, self.executor, Followers(), 5.0)
        self.gives = self.tells = True
        self.goes_on = False
        """It is at the next step when it is asked what it holds."""

    def go_on_to(self, step: int) -> None:
        self.state.record = replace(self.state.record, step=step)


class Swarm:
    """The exporter, which is alone in the first stage, and the donors of the last one; also the exporter's client and membership."""

    def __init__(self, **off: float) -> None:
        torch.set_num_threads(1)
        self.donors: dict[str, Donor] = {}
        self.mine = PeerRecord(peer=PeerId("me"), stage=0)
        self.own = StageState(MANIFEST, self.mine, torch.device("cpu"), self.live)
        self.own.serve()
        self.own.record = replace(self.own.record, step=STEP)
        self.executor = Executor()
        self.donors |= {name: Donor(self, name, by) for name, by in off.items()}
        membership: Any = SimpleNamespace(live=self.live, view=SimpleNamespace(ttl_s=0.01), changed=self.changed)
        downloader = Downloader(self, membership, partial(most_state_bytes, MANIFEST), 5.0, certifies=True)  # type: ignore[arg-type]
        seat = SimpleNamespace(state=self.own, downloader=downloader, snapshots=SnapshotServer(self.own, self.executor, Followers(), 5.0))
        self.peer: Any = SimpleNamespace(seat=seat, membership=membership, place=SimpleNamespace(manifest=MANIFEST), is_resting=False)
        self.said: list[str] = []
        self.gives_later = ""
        """A donor that gives its state once the exporter has refused one."""

    def live(self) -> LiveView:
        return view_of(self.own.record if hasattr(self, "own") else self.mine, *(donor.state.record for donor in self.donors.values()))

    async def changed(self, _timeout_s: float) -> None:
        await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def open(self, peer: PeerId, request: StateRequest, _patience_s: float) -> AsyncIterator[Offer[Snapshot]]:
        donor = self.donors[peer]
        if not donor.gives:
            raise BusyError("others download", 30.0)
        found, lending = await donor.snapshots.snapshot(self.mine.peer, request)
        with lending:
            yield Lent(found, lending)

    async def sketch(self, peer: PeerId, stage: int, seed: bytes, previous: bool, _timeout_s: float) -> ToldSketch:
        donor = self.donors[peer]
        if not donor.tells:
            raise WrongStateError("it tells nothing")
        if donor.goes_on:
            donor.go_on_to(STEP + 1)
        return await donor.snapshots.sketch(PeerId("exporter"), stage, seed, previous)

    async def gather(self, timeout_s: float = 30.0) -> list[Compared]:
        return await export._of_one_step(self.peer, self.say, timeout_s)

    def say(self, text: str, **_: object) -> None:
        self.said.append(text)
        if text == FALSE and self.gives_later:
            self.donors[self.gives_later].gives = True

    def end(self) -> None:
        self.executor.close()
        for donor in self.donors.values():
            donor.executor.close()


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LEAST_PATIENCE_S", 0.5)
    monkeypatch.setattr(download, "SKETCH_AGAIN_S", 0.01)


@contextlib.contextmanager
def swarm_of(**off: float) -> Any:
    swarm = Swarm(**off)
    try:
        yield swarm
    finally:
        swarm.end()


def parameters_of(state: StageState) -> Mapping[str, Tensor]:
    return {f"parameters/{name}": value.detach() for name, value in state.holdings.module.named_parameters()}


def is_honest(swarm: Swarm, found: Compared) -> bool:
    true = parameters_of(swarm.donors["c"].state)
    return all(torch.allclose(found.found.tensors[name], value, rtol=1e-4) for name, value in true.items())


async def test_hole_72_what_a_lying_donor_gives_is_in_no_export() -> None:
    """The others are busy with joiners at first, and are on unlike devices, so nobody offers the same as anybody else."""
    with swarm_of(a=0.01, b=1e-7, c=0.0) as swarm:
        swarm.donors["b"].gives = swarm.donors["c"].gives = False
        swarm.gives_later = "b"
        own, found = await swarm.gather()
        assert FALSE in swarm.said
        assert (own.opinion.verdict, found.opinion.verdict, found.opinion.num_asked) == (StateVerdict.RIGHT, StateVerdict.RIGHT, 3)
        assert is_honest(swarm, found)
        assert [part.opinion.why_unproven(stage) for stage, part in enumerate((own, found))] == ["", ""]


async def test_hole_72_while_only_the_liar_gives_a_state_there_is_no_export() -> None:
    with swarm_of(a=0.01, b=0.0, c=0.0) as swarm:
        swarm.donors["b"].gives = swarm.donors["c"].gives = False
        with pytest.raises(TimedOutError):
            await swarm.gather(timeout_s=0.05)
        assert FALSE in swarm.said


async def test_where_most_offer_one_state_it_is_taken_though_nobody_tells_a_sketch() -> None:
    with swarm_of(a=0.01, b=0.0, c=0.0) as swarm:
        for donor in swarm.donors.values():
            donor.tells = False
        _own, found = await swarm.gather()
        assert (found.opinion.verdict, found.opinion.givers) == (StateVerdict.RIGHT, {"b", "c"})
        assert is_honest(swarm, found)


@pytest.mark.parametrize(
    ("off", "why"),
    [
        ({"a": 0.0}, "only one peer serves stage 1, so nobody else could confirm its state"),
        ({"a": 0.02, "b": 0.0}, "the peers of stage 1 hold unlike states, and more than half hold none of them"),
    ],
)
async def test_an_export_says_where_nobody_can_know(off: dict[str, float], why: str) -> None:
    with swarm_of(**off) as swarm:
        _own, found = await swarm.gather()
        assert found.opinion.why_unproven(1) == why


async def test_a_stage_that_has_gone_on_before_it_was_asked_is_downloaded_once_more_and_then_said_to_be_unproven() -> None:
    with swarm_of(a=1e-6, b=1e-7, c=0.0) as swarm:
        for donor in swarm.donors.values():
            donor.gives, donor.goes_on = donor is swarm.donors[LIAR], True

        async def stays() -> None:
            """The giver stays at its step, for the sake of the second download."""
            while True:
                swarm.donors[LIAR].go_on_to(STEP)
                await asyncio.sleep(0)

        staying = asyncio.ensure_future(stays())
        _own, found = await swarm.gather()
        staying.cancel()
        assert found.opinion.why_unproven(1) == "too few peers of stage 1 told in time what they hold"
        assert sum("gathering" in text for text in swarm.said) == 2


def test_hole_80_an_export_that_was_given_a_false_state_does_not_try_for_ever_what_nobody_can_confirm() -> None:
    """Liars may take the turn for sketches all the time, and one of them gives a false state once. Each may be met once."""
    trust = Acceptance()
    own, false, unasked = (Opinion(verdict, 3) for verdict in (StateVerdict.RIGHT, StateVerdict.WRONG, StateVerdict.OPEN))
    assert "hold another state" in trust.why_not([own, false], "", is_last=False)
    for _ in range(2 * 3 - 1):
        assert "told in time" in trust.why_not([own, unasked], "", is_last=True)
    with pytest.raises(TimedOutError, match="after 6 tries"):
        trust.why_not([own, unasked], "", is_last=False)
