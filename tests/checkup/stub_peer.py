"""A peer for passers-by: a real p2pd and the services that a visitor asks, with whatever fault a test wants. It trains nothing."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from peerd import __version__
from peerd.config.manifest import Manifest
from peerd.config.organiser import create_key, load_key
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.network import describe_self, open_network
from peerd.link.p2pd import watch
from peerd.link.throttle import Throttles
from peerd.link.traffic import Traffic
from peerd.policy.step.contributions import StageTally
from peerd.swarm.directory import Directory
from peerd.swarm.identity import Identity
from peerd.swarm.signed import sign_manifest
from peerd.table.record import PeerId, RawRecord
from peerd.wire.accounts import AccountsTold, AccountsWanted
from peerd.wire.checkup import CheckupServicer
from peerd.wire.door import Door
from peerd.wire.messages import Description
from peerd.wire.services import SwarmServicer
from tests.tiny_run import tiny_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with it, or with the way to it."""

    clock_off_s: float = 0.0
    software: str = __version__
    sees_callers_at: str | None = None
    """A multiaddr in place of where they are."""
    knows_checkups: bool = True
    has_dht: bool = True
    line: float = 0.0
    """Bytes per second that pass between it and others; 0: all."""
    manifest: Manifest = field(default_factory=lambda: tiny_manifest(num_stages=2))


class Stub:
    """Answers who asks which run it serves; nobody else is in it."""

    def __init__(self, description: Description, clock_off_s: float) -> None:
        self._description = description
        self._clock_off_s = clock_off_s

    def gossip(self, caller: PeerId, records: Sequence[RawRecord]) -> Sequence[RawRecord]:
        return ()

    def table(self, caller: PeerId, after: PeerId) -> tuple[Sequence[RawRecord], PeerId]:
        return (), PeerId("")

    def news(self, caller: PeerId, known: Collection[bytes]) -> Sequence[RawRecord]:
        return ()

    async def reaches(self, caller: PeerId, accused: PeerId) -> bool:
        return False

    def describe(self) -> Description:
        return replace(self._description, clock_s=time.time() + self._clock_off_s)

    async def tallies(self) -> Sequence[StageTally]:
        return ()

    async def accounts(self, wanted: AccountsWanted) -> AccountsTold:
        return AccountsTold()


@contextlib.asynccontextmanager
async def stub_peer(faults: Faults) -> AsyncIterator[str]:
    """Its address, with the run."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp", ignore_cleanup_errors=True)))
        create_key(folder / "organiser.key")
        signed = sign_manifest(faults.manifest, load_key(folder / "organiser.key"))
        home = Home(folder / "home")
        home.folder.mkdir()
        Identity.load_or_create(home.identity)
        throttles = Throttles()
        throttles.upload.rate = throttles.download.rate = faults.line
        settings = Settings(home=str(home.folder), host="127.0.0.1", ephemeral=True)
        network = await open_network(settings, home, (), lambda _peer: (), throttles)
        ended = asyncio.ensure_future(watch(network.p2pd))
        stack.push_async_callback(asyncio.wait, {ended})
        stack.push_async_callback(network.close)
        door = Door(signed.run, 5.0, Traffic())
        description = replace(describe_self([signed]), software=faults.software)
        stub = Stub(description, faults.clock_off_s)
        servicers: list[object] = [SwarmServicer(door, stub, stub)]
        if faults.knows_checkups:
            origin = faults.sees_callers_at
            servicers.append(CheckupServicer(door, (lambda _peer: origin) if origin else network.tunnel.seen_at))
        if faults.has_dht:
            directory = await Directory.join(network.p2pd.p2p, signed, (), must_answer=False)
            stack.push_async_callback(directory.close)
        await network.serve(servicers)
        stack.push_async_callback(network.stop_serving)
        yield f"{network.addresses[0]}#{signed.run}"
