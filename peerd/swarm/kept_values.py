"""What this node of the DHT keeps for others: no more than a bounded number of values under each key, whatever others store."""

from __future__ import annotations

from heapq import heapify
from typing import Any

from peerd.link.libp2p import DHTID, DHTLocalStorage, DictionaryDHTValue

MAX_VALUES = 64
"""Number of values under one key. A stage of a large swarm stores four, and a small swarm has no more than 15 peers."""
_SLACK = 4
"""Entries of a heap of expiries for each value; hivemind adds one with each store and drops it when its time has come."""


class KeptValues(DHTLocalStorage):
    """The value that came first makes room for one too many: a peer that is there stores its value again soon."""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        found = self.get(key)
        kept = found.value if found is not None and isinstance(found.value, DictionaryDHTValue) else None
        if kept is not None and subkey not in kept and len(kept) >= MAX_VALUES:
            del kept[next(iter(kept.data))]
        is_stored = super().store_subkey(key, subkey, value, expiration_time)
        for storage in (self, kept):
            if storage is not None and len(storage.expiration_heap) > _SLACK * max(MAX_VALUES, len(storage.data)):
                storage.expiration_heap = list(storage.key_to_heap.values())
                heapify(storage.expiration_heap)
        return bool(is_stored)
