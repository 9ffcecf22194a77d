"""This peer's own row in the table: the step of the stage that it serves, and what is measured beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from peerd import __version__
from peerd.daemon.device import describe
from peerd.table.record import PeerRecord, Vitals

if TYPE_CHECKING:
    from peerd.daemon.node import Node

LOG = structlog.get_logger()


class Row:
    """What `Membership` publishes: nothing before a stage is served."""

    def __init__(self) -> None:
        self._node: Node | None = None

    def show(self, node: Node) -> None:
        """From now on the row tells of this stage."""
        self._node = node

    def record(self) -> PeerRecord | None:
        return self._node.state.record if self._node is not None else None

    def vitals(self) -> Vitals:
        node = self._node
        if node is None:
            return Vitals()
        counters, history, trainer = node.service.counters, node.state.history, node.trainer
        return Vitals(
            addresses=node.reachability.addresses,
            reach=node.reachability.reach,
            relays=not node.network.relay.off,
            leaving=node.leaving,
            trains=trainer is not None and not node.trained_enough,
            trains_from=node.training.trains_from,
            queue=node.service.queue,
            in_flight=trainer.in_flight if trainer else 0,
            throughput=counters.throughput,
            tokens=counters.tokens,
            last_loss=history[-1].loss if history else None,
            evaluation=node.training.evaluation,
            software=__version__,
            device=describe(node.place.device),
            memory_bytes=node.place.memory_bytes,
        )

    def fenced(self, reason: str) -> None:
        node = self._node
        if node is not None:
            LOG.warning("fenced: ledger dropped, view cleared", reason=reason)
            node.stepper.fence(node.local.raise_incarnation(node.state.record.incarnation))
