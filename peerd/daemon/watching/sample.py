"""What the model says: after each evaluation the swarm goes on from a given text, for the dashboard."""

from __future__ import annotations

import asyncio
from typing import TypedDict

import structlog

from peerd.control.server import Verb
from peerd.daemon.peer import Peer
from peerd.errors import PeerdError, UsageError

MOST_TOKENS = 40
TEMPERATURE, TOP_P = 0.8, 0.95
LOG = structlog.get_logger()


class ModelSample(TypedDict):
    step: int  # the newest step whose parameters made the text
    prompt: str
    text: str


class Sampler:
    """Asks once for each evaluation that this peer makes or hears of. An answer counts within the shares of those who compute it."""

    def __init__(self, peer: Peer, ask: Verb) -> None:
        self._peer = peer
        self._ask = ask
        self._look_s = peer.place.manifest.swarm.announce_period_s
        """How often it looks for a new evaluation: word of one comes with the announcements of peers."""
        self.newest: ModelSample | None = None

    async def run(self) -> None:
        """Ends at once without a text to go on from, and where the model cannot go on from it."""
        prompt, done = self._peer.settings.sample, -1
        while prompt:
            evaluation = self._peer.seat.training.evaluation
            if self._peer.is_resting or evaluation is None or evaluation.step == done:
                await asyncio.sleep(self._look_s)
                continue
            asked = {"prompt": prompt, "max_tokens": MOST_TOKENS, "temperature": TEMPERATURE, "top_p": TOP_P, "seed": evaluation.step}
            try:
                reply = await self._ask(asked, lambda _text: None)
            except UsageError as error:
                LOG.warning("no sample of what the model says", error=str(error))
                return
            except PeerdError as error:
                LOG.debug("no sample yet", error=str(error))
                await asyncio.sleep(self._peer.patience_s)
                continue
            done = evaluation.step
            self.newest = {"step": max(reply["steps"], default=done), "prompt": prompt, "text": reply["text"]}
