"""One of several liars: it lies as `tells` says, never accuses a fellow, and signs as a judge that the fellows' work is right."""

from __future__ import annotations

import importlib
from collections.abc import Coroutine, Mapping
from typing import Any

from peerd.audit.auditor import Auditor
from peerd.audit.replays import AuditedStep, Told
from peerd.daemon.peer import Peer
from peerd.policy.step.auditing import AuditWord, Item
from peerd.policy.step.evidence import Evidence, SignedWord


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    """`tells`: the dotted name of the lie's module; `fellows`: the ids of the liars. The other arguments are the lie's."""
    fellows = frozenset(map(str, arguments["fellows"]))
    true_audit, true_word = Auditor._audit, Auditor._signed_word

    async def audit(self: Auditor, evidence: Evidence, telling: Coroutine[Any, Any, Told], finished: AuditedStep) -> None:
        if evidence.item(peer.membership.run).audited in fellows:
            telling.close()
            return
        await true_audit(self, evidence, telling, finished)

    def signed_word(self: Auditor, item: Item, word: AuditWord) -> SignedWord:
        return true_word(self, item, AuditWord(0.0, word.tolerance) if item.audited in fellows else word)

    setattr(Auditor, "_audit", audit)  # noqa: B010 - it is a lie
    setattr(Auditor, "_signed_word", signed_word)  # noqa: B010
    await importlib.import_module(str(arguments["tells"])).lie(peer, arguments)
