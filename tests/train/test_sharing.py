"""Data transfer between peers: every chunk is checked, interruptions lose nothing, and surplus bytes are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
from blake3 import blake3

from peerd.config.manifest import DataConfig
from peerd.data import tokens
from peerd.data.tokenizer import tokenizer_path
from peerd.data.tokens import chunk_hashes, hash_of_hashes, kept_tokens
from peerd.errors import BusyError, PeerGoneError, StageError, WrongStateError
from peerd.policy.route.admission import givers_of_data
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId
from peerd.table.view import LiveView
from peerd.train import sharing
from peerd.train.sharing import DataFetcher, DataGiver
from peerd.wire.clients import DataClient, DataHeader
from tests.strategies import member, view_of

CHUNK_BYTES = 2 << 20
"""Smaller than between real peers, so that a few megabytes make several chunks."""
CONTENT = bytes(range(256)) * (CHUNK_BYTES * 2 // 256 + 10)
TOKENIZER = b"{}"


@pytest.fixture
def data(tmp_path: Path, unhurried: None) -> DataConfig:
    """The data section of a run whose data lies in `there`."""
    there = tmp_path / "there"
    there.mkdir()
    digest, words = blake3(CONTENT).hexdigest(), blake3(TOKENIZER).hexdigest()
    (there / f"{digest}.bin").write_bytes(CONTENT)
    (there / f"{words}.tokenizer.json").write_bytes(TOKENIZER)
    chunks = hash_of_hashes(chunk_hashes(there / f"{digest}.bin"))
    return DataConfig(blake3=digest, chunks_blake3=chunks, num_tokens=len(CONTENT) // 2, token_bytes=2, tokenizer_blake3=words)


@dataclass
class Donors:
    """Peers that answer through real givers, and break off or lie as they are told."""

    givers: dict[PeerId, DataGiver]
    breaks_after: dict[PeerId, int] = field(default_factory=dict)
    lies: frozenset[PeerId] = frozenset()
    asked: list[tuple[PeerId, int]] = field(default_factory=list)

    async def get_data(self, peer: PeerId, digest: bytes, first_chunk: int, _patience_s: float) -> tuple[DataHeader, AsyncGenerator[bytes]]:
        self.asked.append((peer, first_chunk))
        num_bytes, hashes, messages = await self.givers[peer].give(digest.hex(), first_chunk)
        return DataHeader(num_bytes, tuple(hashes)), self._passed_on(peer, messages)

    async def _passed_on(self, peer: PeerId, messages: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        left = self.breaks_after.get(peer, len(CONTENT))
        async with aclosing(messages):
            async for message in messages:
                if left <= 0:
                    raise PeerGoneError("gone in the middle")
                left -= len(message)
                yield bytes(len(message)) if peer in self.lies else message

    def live(self) -> LiveView:
        return view_of(member("me"), *(member(peer, trains=True) for peer in self.givers), member("bare"))


def donors_of(data: DataConfig, folder: Path, *names: str) -> Donors:
    givers = {PeerId(name): DataGiver(data, folder) for name in names}
    for giver in givers.values():
        giver.has_tokens = True
    return Donors(givers)


def fetcher_of(donors: Donors, data: DataConfig, cache: Path) -> DataFetcher:
    return DataFetcher(cast(DataClient, donors), cast(Membership, donors), data, cache, 5.0)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(tokens, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(sharing, "GIVEN_BYTES_PER_S", 1 << 40)
    monkeypatch.setattr(sharing, "RETRY_PAUSE_S", 0.0)


async def test_tokens_and_tokenizer_come_whole_and_nothing_else_is_left(tmp_path: Path, data: DataConfig) -> None:
    here = tmp_path / "here"
    found = await fetcher_of(donors_of(data, tmp_path / "there", "a"), data, here).fetch()
    assert found.path.read_bytes() == CONTENT
    assert (found.num_tokens, found.token_bytes) == (data.num_tokens, 2)
    assert tokenizer_path(data, here) is not None
    assert len(list(here.iterdir())) == 2


async def test_another_donor_goes_on_where_the_first_broke_off(tmp_path: Path, data: DataConfig) -> None:
    donors = donors_of(data, tmp_path / "there", "a", "b")
    first = _order_of(donors)[0]
    donors.breaks_after = {first: CHUNK_BYTES + 5}
    found = await fetcher_of(donors, data, tmp_path / "here").fetch()
    assert found.path.read_bytes() == CONTENT
    assert donors.asked[:2] == [(first, 0), ("b" if first == "a" else "a", 1)]


async def test_a_lying_donor_costs_one_chunk_and_nobody_believes_it(tmp_path: Path, data: DataConfig) -> None:
    donors = donors_of(data, tmp_path / "there", "a", "b")
    donors.lies = frozenset(_order_of(donors)[:1])
    assert (await fetcher_of(donors, data, tmp_path / "here").fetch()).path.read_bytes() == CONTENT


async def test_what_was_there_before_is_checked_and_kept(tmp_path: Path, data: DataConfig) -> None:
    here = tmp_path / "here"
    here.mkdir()
    part = here / f"{data.blake3}.part"
    donors = donors_of(data, tmp_path / "there", "a")
    part.write_bytes(CONTENT[: CHUNK_BYTES + 100])
    await fetcher_of(donors, data, here).fetch()
    assert donors.asked[0] == ("a", 1)
    kept = kept_tokens(data, here)
    assert kept is not None
    kept.path.unlink()
    part.write_bytes(bytes(CHUNK_BYTES))
    assert (await fetcher_of(donors, data, here).fetch()).path.read_bytes() == CONTENT


async def test_data_larger_than_a_peer_fetches_is_refused_before_anything_is_written(tmp_path: Path, data: DataConfig) -> None:
    huge = replace(data, num_tokens=1 << 40)
    with pytest.raises(StageError, match="more than a peer fetches from others; get it elsewhere"):
        await fetcher_of(donors_of(data, tmp_path / "there", "a"), huge, tmp_path / "here").fetch()


async def test_only_the_runs_files_are_given_and_to_few_at_a_time(tmp_path: Path, data: DataConfig) -> None:
    giver = DataGiver(data, tmp_path / "there")
    with pytest.raises(WrongStateError, match="this peer does not have that data"):
        await giver.give(data.blake3, 0)
    giver.has_tokens = True
    for digest in ("", "ab" * 32, "../" * 8):
        with pytest.raises(WrongStateError):
            await giver.give(digest, 0)
    streams = []
    for _ in range(sharing.MAX_CALLERS):
        _, hashes, messages = await giver.give(data.blake3, 0)
        assert len(hashes) == 3
        await anext(messages)
        streams.append(messages)
    with pytest.raises(BusyError):
        await giver.give(data.blake3, 0)
    for messages in streams:
        await messages.aclose()
    await giver.give(data.blake3, 0)


async def test_the_pace_is_shared_by_all_who_fetch(tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "GIVEN_BYTES_PER_S", 16 << 20)  # 1 MiB in 1/16 s
    giver = DataGiver(data, tmp_path / "there")
    giver.has_tokens = True
    began_s = asyncio.get_running_loop().time()

    async def take(count: int) -> None:
        _, _, messages = await giver.give(data.blake3, 0)
        async with aclosing(messages):
            for _ in range(count):
                await anext(messages)

    await asyncio.gather(take(4), take(4))
    assert asyncio.get_running_loop().time() - began_s > 6 / 16


def _order_of(donors: Donors) -> list[PeerId]:
    """The order in which donors are asked."""
    return [record.peer for record in givers_of_data(donors.live())]
