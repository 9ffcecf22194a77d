"""The directory: records and the run's manifest in hivemind's Kademlia DHT. It finds and keeps them, but is seconds late.

The DHT node runs in this process's event loop. Values that it stores for others pass the same checks as everything else from the
network: a record is accepted only under its own stage's key and its own peer id, with a valid signature.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import structlog

from peerd.background import Tasks
from peerd.errors import PeerdError, UnreachableError
from peerd.link.libp2p import DHTID, P2P, DHTNode, DHTRecord, MSGPackSerializer, RecordValidatorBase, get_dht_time
from peerd.swarm.signed import SignedManifest, SignedRecord, pack, unpack_manifest, unpack_record
from peerd.table.record import RawRecord, RunId

MANIFEST_SUBKEY = "manifest"
MANIFEST_LIFE_S = 3600.0
OPERATION_TIMEOUT_S = 10.0
SHUTDOWN_S = 1.0
ROUND_TRIP_TIMEOUT_S = 15.0
ROUND_TRIP_LIFE_S = 30.0
BEAM = 8
"""Number of nodes nearest to a key that are asked; the nearest five keep the value. An answer has all values its node keeps for the key."""
MAX_SOUND = 1024
LOG = structlog.get_logger()


class RunValidator(RecordValidatorBase):
    """Refuses values other than signed records and manifests of this run under the right keys."""

    def __init__(self, run: RunId, num_stages: int) -> None:
        self._run = run
        self._manifest_key = _key_bytes(run)
        self._stage_keys = {_key_bytes(stage_key(run, stage)): stage for stage in range(num_stages)}
        self._sound: set[tuple[bytes, bytes, bytes]] = set()
        """Values found valid recently: each node that keeps a record returns it with every answer."""

    def validate(self, record: DHTRecord) -> bool:
        if record.key != self._manifest_key and record.key not in self._stage_keys:
            return True  # a key of another run, which this validator does not judge
        told = (record.key, record.subkey, record.value)
        if told in self._sound:
            return True
        if not self._is_sound(record):
            return False
        if len(self._sound) >= MAX_SOUND:
            self._sound.clear()
        self._sound.add(told)
        return True

    def _is_sound(self, record: DHTRecord) -> bool:
        stage = self._stage_keys.get(record.key)
        try:
            subkey, value = msgpack.unpackb(record.subkey), MSGPackSerializer.loads(record.value)
            if stage is None:
                return subkey == MANIFEST_SUBKEY and unpack_manifest(value).run == self._run
            signed = unpack_record(value, self._run)
        except (PeerdError, ValueError, TypeError, msgpack.exceptions.UnpackException):
            return False
        return bool(signed.record.stage == stage and signed.record.peer == subkey)

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return False


class Directory:
    """This daemon's access to the DHT."""

    def __init__(self, node: DHTNode, num_stages: int, period_s: float) -> None:
        self._node = node
        self._num_stages = num_stages
        self._period_s = period_s
        self.is_client = False
        """True if the node of the next rebuild stores nothing for others."""
        self._stores = Tasks()

    @classmethod
    async def join(cls, p2p: P2P, signed: SignedManifest, bootstrap: Sequence[str], must_answer: bool) -> Directory:
        """Start a DHT node. Raises UnreachableError if no bootstrap peer answers although one must."""
        num_stages, period_s = signed.manifest.train.num_stages, signed.manifest.swarm.announce_period_s
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                node = await _start_node(p2p, signed.run, num_stages, bootstrap, must_answer)
        except Exception as error:  # hivemind raises plain exceptions here
            said = str(error) or "no answer in time"
            raise UnreachableError(f"the swarm's DHT does not answer: {said}", "check the address and your network") from None
        return cls(node, num_stages, period_s)

    async def rebuild(self, p2p: P2P, run: RunId, bootstrap: Sequence[str]) -> None:
        """Start a new node, over a new p2pd or in the other role. If nobody answers it starts alone, and later reads find the others."""
        await self._end_node()
        async with asyncio.timeout(OPERATION_TIMEOUT_S):
            self._node = await _start_node(p2p, run, self._num_stages, bootstrap, must_answer=False, is_client=self.is_client)

    def store_soon(self, run: RunId, signed: SignedRecord) -> None:
        """Store this peer's record in the background. If that fails, the next store makes up for it."""
        expires = get_dht_time() + 3 * self._period_s * signed.record.periods + 3.0
        key, subkey, value = stage_key(run, signed.record.stage), signed.record.peer, pack(signed)
        self._stores.start(self._store(key, subkey, value, expires))

    def store_manifest_soon(self, signed: SignedManifest) -> None:
        expires = get_dht_time() + MANIFEST_LIFE_S
        self._stores.start(self._store(signed.run, MANIFEST_SUBKEY, pack(signed), expires))

    async def read_records(self, run: RunId, stages: Iterable[int]) -> list[RawRecord]:
        """Return the stored records of these stages, not verified."""
        keys = [stage_key(run, stage) for stage in stages]
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):  # infinite expiration: otherwise an outdated record would suffice
                found = await self._node.get_many(keys, sufficient_expiration_time=math.inf, beam_size=BEAM)
        except Exception as error:  # gossip works without the DHT
            LOG.debug("the DHT could not be read", error=repr(error))
            return []
        return [raw for entry in found.values() if entry is not None for raw in _raws_in(entry.value)]

    async def close(self) -> None:
        self._stores.cancel()
        await self._end_node()

    async def _end_node(self) -> None:
        """Shut the node down. If its p2pd is gone it never answers, so the wait is short."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SHUTDOWN_S):
                await self._node.shutdown()

    async def _store(self, key: str, subkey: str, value: bytes, expires: float) -> None:
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                await self._node.store(key, subkey=subkey, value=value, expiration_time=expires, beam_size=BEAM)
        except Exception as error:  # the next store follows soon, and gossip does not need it
            LOG.debug("the DHT could not be written", error=repr(error))


async def _start_node(
    p2p: P2P, run: RunId, num_stages: int, bootstrap: Sequence[str], must_answer: bool, is_client: bool = False
) -> DHTNode:
    return await DHTNode.create(
        p2p=p2p,
        initial_peers=list(bootstrap) or None,
        record_validator=RunValidator(run, num_stages),
        client_mode=is_client,
        # No cache: only the newest records are of use, and with a cache each store would read the key again.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        ensure_bootstrap_success=must_answer,
        strict=False,  # else one bootstrap peer whose clock is off, or that is slow, keeps this one out
    )


async def round_trip(p2p: P2P, bootstrap: Sequence[str]) -> str:
    """Write a value that other nodes keep, and read it back from them. Returns what went wrong; empty if nothing did."""
    node = None
    try:
        async with asyncio.timeout(ROUND_TRIP_TIMEOUT_S):
            node = await DHTNode.create(p2p=p2p, initial_peers=list(bootstrap), client_mode=True, cache_locally=False, cache_on_store=False)
            key, value = secrets.token_hex(16), secrets.token_hex(16)
            if not await node.store(key, value, get_dht_time() + ROUND_TRIP_LIFE_S, exclude_self=True):
                return "no peer keeps what is written"
            found = await node.get(key, latest=True)
            return "" if found is not None and found.value == value else "what was written cannot be read back"
    except Exception as error:  # hivemind raises plain exceptions here
        return f"it does not answer: {str(error) or 'no answer in time'}"
    finally:
        if node is not None:
            await node.shutdown()


def stage_key(run: RunId, stage: int) -> str:
    return f"{run}.stage.{stage}"


def _key_bytes(key: str) -> bytes:
    return bytes(DHTID.generate(source=key).to_bytes())


def _raws_in(entries: Any) -> Iterable[RawRecord]:
    if not isinstance(entries, dict):
        return
    for item in entries.values():
        try:
            body, signature = msgpack.unpackb(item.value)
            yield body, signature
        except (ValueError, TypeError, AttributeError, msgpack.exceptions.UnpackException):
            continue
