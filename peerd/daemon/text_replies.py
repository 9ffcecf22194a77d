"""What this daemon tells of the texts that its stage goes on with."""

from __future__ import annotations

from peerd.control.texts import TextsInfo
from peerd.daemon.peer import Peer


def texts_info(peer: Peer) -> TextsInfo:
    texts = peer.seat.texts
    return {
        "share": texts.turns.share.share,
        "steps": [] if peer.is_resting else sorted(texts.steps),
        "texts": len(texts.sessions.ids),
        "waiting": texts.turns.num_waiting,
        "bytes": texts.sessions.num_bytes,
        "most_bytes": texts.sessions.limits.most_bytes,
        "copy_bytes": peer.seat.state.evaluated.num_bytes,
        "tokens": texts.counts.tokens,
        "busy_s": texts.counts.busy_s,
        "held_up_s": texts.counts.held_up_s,
        "answering": texts.is_answering,
        "asking": peer.num_asking,
    }
