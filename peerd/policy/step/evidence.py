"""A case as it travels, with the signatures that let anybody check it: rule 20 (audit). Pure.

It holds the receipts of the microbatch, the signed words of its judges, and the secret of the accuser's coins, to which the accuser was
committed before the step (coins.py).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from peerd.policy.hashing import digest
from peerd.policy.step.auditing import AuditWord, Item
from peerd.policy.step.parts import SentPart
from peerd.policy.step.receipts import SentOn, SignatureCheck, SignedPass
from peerd.policy.step.verdicts import Case
from peerd.table.record import PeerId, RunId

MOST_WORDS_EACH = 2
"""Words of one judge: two that contradict each other prove that it lies."""
MOST_WORDS = 1024


def coins_text(run: RunId) -> bytes:
    """The text whose signature is the seed of an auditor's coins in a run. It is shown to nobody, and is the same after a restart."""
    return digest("coins of", run, size=32)


def word_text(run: RunId, item: Item, word: AuditWord) -> bytes:
    """The text that a judge signs."""
    return digest("word", run, item.id, struct.pack(">dd", word.deviation, word.tolerance), size=32)


def insistence_text(run: RunId, item: Item) -> bytes:
    """The text that an accuser signs once it has computed the item again after another judge found nothing."""
    return digest("insists", run, item.id, size=32)


@dataclass(frozen=True, slots=True)
class SignedWord:
    judge: PeerId
    word: AuditWord
    signature: bytes


@dataclass(frozen=True, slots=True)
class Evidence:
    """A case with its signatures."""

    signed: SignedPass | SentOn | SentPart
    """The microbatch that is said to be wrong, or its forward pass alone, or a chunk of the part that is."""
    accuser: PeerId
    coins: bytes
    """The secret of the accuser's coins for the item's step."""
    words: tuple[SignedWord, ...] = ()
    insists: bytes = b""
    """The accuser's signature of that it has computed the item once more; empty: it has not."""

    def item(self, run: RunId) -> Item:
        return self.signed.item(run)

    def case(self, run: RunId) -> Case | None:
        """The case that these words make; None without a word of the accuser."""
        first = next((each for each in self.words if each.judge == self.accuser), None)
        if first is None:
            return None
        item, words, two_faced = self.item(run), {self.accuser: first.word}, set[PeerId]()
        for each in self.words:
            known = words.setdefault(each.judge, each.word) if each.judge != item.audited else each.word
            if known is not each.word and not known.agrees_with(each.word):
                two_faced.add(each.judge)
        return Case(item, self.accuser, words, bool(self.insists), frozenset(two_faced))

    def of_judges(self, judges: Collection[PeerId]) -> Evidence:
        """This evidence with the words of the accuser and of these judges alone.

        A key costs nothing: the words of a thousand of them would leave no room for those that count.
        """
        kept = tuple(each for each in self.words if each.judge == self.accuser or each.judge in judges)
        return replace(self, words=kept) if len(kept) < len(self.words) else self

    def with_words(self, words: Iterable[SignedWord]) -> Evidence:
        """This evidence with more words. A judge's second one is kept only if it contradicts its first."""
        kept, by_judge = list(self.words), dict[PeerId, list[AuditWord]]()
        for each in self.words:
            by_judge.setdefault(each.judge, []).append(each.word)
        for each in words:
            own = by_judge.setdefault(each.judge, [])
            is_news = not own or (len(own) < MOST_WORDS_EACH and not own[0].agrees_with(each.word))
            if is_news and len(kept) < MOST_WORDS:
                kept.append(each)
                own.append(each.word)
        return replace(self, words=tuple(kept)) if len(kept) > len(self.words) else self

    def merged(self, other: Evidence) -> Evidence:
        """What two peers know of one case. Two accusers of one item have a case each, and all words count in both."""
        insists = self.insists or (other.insists if other.accuser == self.accuser else b"")
        return replace(self.with_words(other.words), insists=insists)

    def why_unsigned(self, run: RunId, is_of: SignatureCheck) -> str:
        """Why this proves nothing; empty if the microbatch and every word are signed by those that they name."""
        item = self.item(run)
        if (reason := self.signed.why_unsigned(run, is_of)) != "":
            return reason
        if self.insists and not is_of(self.accuser, insistence_text(run, item), self.insists):
            return "the accuser does not insist"
        forged = (each.judge for each in self.words if not is_of(each.judge, word_text(run, item, each.word), each.signature))
        return next((f"{judge} has not signed its word" for judge in forged), "")
