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
from peerd.policy.swarm.clocks import MAX_CLOCK_OFFSET_S
from peerd.served_time import served_timeout
from peerd.swarm.kept_values import KeptValues
from peerd.swarm.signed import SignedManifest, SignedRecord, pack, unpack_manifest, unpack_record
from peerd.table.record import RawRecord, RunId
from peerd.table.view import TTL_PERIODS

MANIFEST_SUBKEY = "manifest"
MANIFEST_LIFE_S = 3600.0
OPERATION_TIMEOUT_S = 10.0
SHUTDOWN_S = 1.0
ROUND_TRIP_TIMEOUT_S = 15.0
ROUND_TRIP_LIFE_S = 30.0
BEAM = 8
"""Number of nodes nearest to a key that are asked; the nearest five keep the value. An answer has all values its node keeps for the key."""
MAX_SOUND = 1024
MAX_VALUE_BYTES, MAX_TRIAL_BYTES = 1 << 17, 128
"""Size of a value with its subkey; a manifest is the largest."""
LOG = structlog.get_logger()


class RunValidator(RecordValidatorBase):
    """Refuses all but signed records and manifests of this run under the right keys, and what would be kept for too long."""

    def __init__(self, run: RunId, num_stages: int, period_s: float) -> None:
        self._run = run
        self._period_s = period_s
        self._manifest_key, self._trial_key = _key_bytes(run), _key_bytes(trial_key(run))
        self._stage_keys = {_key_bytes(stage_key(run, stage)): stage for stage in range(num_stages)}
        self._sound: dict[tuple[bytes, bytes, bytes], float] = {}
        """Values found valid recently, with the longest time to keep each: each node that keeps a record returns it with every answer."""

    def validate(self, record: DHTRecord) -> bool:
        told = (record.key, record.subkey, record.value)
        life_s = self._sound.get(told)
        if life_s is None:
            life_s = self._life_s(record)
            if len(self._sound) >= MAX_SOUND:
                self._sound.clear()
            if life_s:
                self._sound[told] = life_s
        return bool(life_s) and record.expiration_time <= get_dht_time() + life_s + MAX_CLOCK_OFFSET_S

    def _life_s(self, record: DHTRecord) -> float:
        """Return the longest time for which a value may be kept; 0 if it is none of this run."""
        if len(record.subkey) + len(record.value) > MAX_VALUE_BYTES:
            return 0.0
        stage = self._stage_keys.get(record.key)
        try:
            subkey, value = msgpack.unpackb(record.subkey), MSGPackSerializer.loads(record.value)
            if record.key == self._trial_key:
                return ROUND_TRIP_LIFE_S if len(record.subkey) + len(record.value) <= MAX_TRIAL_BYTES else 0.0
            if record.key == self._manifest_key:
                return MANIFEST_LIFE_S if subkey == MANIFEST_SUBKEY and unpack_manifest(value).run == self._run else 0.0
            signed = unpack_record(value, self._run) if stage is not None else None
        except (PeerdError, ValueError, TypeError, msgpack.exceptions.UnpackException):
            return 0.0
        if signed is None or signed.record.stage != stage or signed.record.peer != subkey:
            return 0.0
        return _life_of_record_s(signed, self._period_s)

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
            async with served_timeout(OPERATION_TIMEOUT_S):
                node = await _start_node(p2p, RunValidator(signed.run, num_stages, period_s), bootstrap, must_answer)
        except Exception as error:  # hivemind raises plain exceptions here
            said = str(error) or "no answer in time"
            raise UnreachableError(f"the swarm's DHT does not answer: {said}", "check the address and your network") from None
        return cls(node, num_stages, period_s)

    async def rebuild(self, p2p: P2P, run: RunId, bootstrap: Sequence[str]) -> None:
        """Start a new node, over a new p2pd or in the other role. If nobody answers it starts alone, and later reads find the others."""
        await self._end_node()
        async with served_timeout(OPERATION_TIMEOUT_S):
            validator = RunValidator(run, self._num_stages, self._period_s)
            self._node = await _start_node(p2p, validator, bootstrap, must_answer=False, is_client=self.is_client)

    def store_soon(self, run: RunId, signed: SignedRecord) -> None:
        """Store this peer's record in the background. If that fails, the next store makes up for it."""
        expires = get_dht_time() + _life_of_record_s(signed, self._period_s)
        key, subkey, value = stage_key(run, signed.record.stage), signed.record.peer, pack(signed)
        self._stores.start(self._store(key, subkey, value, expires))

    def store_manifest_soon(self, signed: SignedManifest) -> None:
        expires = get_dht_time() + MANIFEST_LIFE_S
        self._stores.start(self._store(signed.run, MANIFEST_SUBKEY, pack(signed), expires))

    async def read_records(self, run: RunId, stages: Iterable[int]) -> list[RawRecord]:
        """Return the stored records of these stages, not verified."""
        keys = [stage_key(run, stage) for stage in stages]
        try:
            async with served_timeout(OPERATION_TIMEOUT_S):  # infinite expiration: otherwise an outdated record would suffice
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
            async with served_timeout(OPERATION_TIMEOUT_S):
                await self._node.store(key, subkey=subkey, value=value, expiration_time=expires, beam_size=BEAM)
        except Exception as error:  # the next store follows soon, and gossip does not need it
            LOG.debug("the DHT could not be written", error=repr(error))


async def _start_node(p2p: P2P, validator: RunValidator, bootstrap: Sequence[str], must_answer: bool, is_client: bool = False) -> DHTNode:
    node = await DHTNode.create(
        p2p=p2p,
        initial_peers=list(bootstrap) or None,
        record_validator=validator,
        client_mode=is_client,
        # No cache: only the newest records are of use, and with a cache each store would read the key again.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        ensure_bootstrap_success=must_answer,
        strict=False,  # else one bootstrap peer whose clock is off, or that is slow, keeps this one out
    )
    node.protocol.storage, node.protocol.cache = KeptValues(), KeptValues()
    return node


async def round_trip(p2p: P2P, run: RunId, bootstrap: Sequence[str]) -> str:
    """Write a value that other nodes of the run keep, and read it back from them. Returns what went wrong; empty if nothing did."""
    node = None
    try:
        async with served_timeout(ROUND_TRIP_TIMEOUT_S):
            node = await DHTNode.create(p2p=p2p, initial_peers=list(bootstrap), client_mode=True, cache_locally=False, cache_on_store=False)
            key, subkey, value = trial_key(run), secrets.token_hex(16), secrets.token_hex(16)
            if not await node.store(key, value, get_dht_time() + ROUND_TRIP_LIFE_S, subkey=subkey, exclude_self=True):
                return "no peer keeps what is written"
            found = await node.get(key, latest=True)
            kept = found.value.get(subkey) if found is not None and isinstance(found.value, dict) else None
            return "" if kept is not None and kept.value == value else "what was written cannot be read back"
    except Exception as error:  # hivemind raises plain exceptions here
        return f"it does not answer: {str(error) or 'no answer in time'}"
    finally:
        if node is not None:
            await node.shutdown()


def trial_key(run: RunId) -> str:
    """The key under which a newcomer tries whether the nodes keep values."""
    return f"{run}.trial"


def _life_of_record_s(signed: SignedRecord, period_s: float) -> float:
    """As long as the record counts, and some seconds for the way."""
    return TTL_PERIODS * period_s * signed.record.periods + 3.0


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
