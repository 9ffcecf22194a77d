"""A daemon's convictions outlast it: they lie in its home with their evidence, checked when they are read again. Rule 20 (audit)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from peerd.audit.cases import Cases
from peerd.audit.store import STANDING_FILE, CaseStore
from peerd.policy.step.auditing import AuditWord
from peerd.policy.step.evidence import Evidence, SignedWord, word_text
from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, SignedPass
from peerd.policy.step.verdicts import Ruling
from peerd.table.record import PeerId
from tests.stage.signed_life import RUN, Key

WRONG, RIGHT = AuditWord(2.0, 1e-4), AuditWord(1e-7, 1e-4)


class Stage:
    """A stage of four with keys: the first one lies. `caller`: of the stage before."""

    def __init__(self) -> None:
        self.liar, *self.honest = (Key() for _ in range(4))
        self.caller = Key()

    @property
    def voters(self) -> list[PeerId]:
        return [key.peer for key in (self.liar, *self.honest)]

    def evidence(self, judges: Iterable[Key], step: int = 3) -> Evidence:
        """The first judge is the accuser."""
        judges = [*judges]
        asked = AskedPass(0, step, 5, self.caller.peer, self.liar.peer, b"i" * 32, b"l" * 32)
        answered = AnsweredPass(NOTHING, NOTHING, b"p" * 32)
        signatures = self.caller.sign(asked.text(RUN)), self.liar.sign(answered.text(asked, RUN))
        signed = SignedPass(Receipt(asked, answered, *signatures))
        item = signed.own.item(RUN)
        words = [SignedWord(key.peer, WRONG, key.sign(word_text(RUN, item, WRONG))) for key in judges]
        return Evidence(signed, judges[0].peer, b"c" * 32).with_words(words)


def kept(folder: Path, stage: Stage, evidence: Evidence) -> Cases:
    """What a daemon knows that has convicted somebody by this evidence, once it is in its home."""
    cases = Cases(stage.honest[0].peer, RUN)
    cases.standing.found(stage.voters)
    cases.standing.finished(stage.voters, 3)
    cases.hear(evidence, stage.voters, 0.0)
    cases.rule(1.0, 1.0, 4)
    asyncio.run(CaseStore(folder, cases).keep())
    return cases


def read(folder: Path, me: PeerId) -> Cases:
    cases = Cases(me, RUN)
    CaseStore(folder, cases).read()
    return cases


def test_a_restart_knows_the_convictions_with_their_evidence_and_who_stands(tmp_path: Path) -> None:
    stage = Stage()
    before = kept(tmp_path, stage, stage.evidence(stage.honest))
    for me in (stage.honest[0].peer, stage.liar.peer):
        after = read(tmp_path, me)
        assert after.losers == before.losers == {stage.liar.peer}
        assert after.convictions() == before.convictions()
        [known] = after.known.values()
        assert (known.ruling, known.voters) == (Ruling.CONVICTED, frozenset(stage.voters))
        assert after.standing.has_lost(stage.liar.peer)
        assert after.standing.standing(stage.voters) == {key.peer for key in stage.honest}
        assert after.standing.notes() == before.standing.notes()
        assert (after.rule(1e9, 1.0, 9), after.to_judge(1e9, 1.0), after.to_insist()) == ([], [], [])
    assert "mates computed this peer's microbatch 5 of step 3 again" in read(tmp_path, stage.liar.peer).own_fault


def test_nothing_is_kept_of_a_case_that_has_cost_nobody_anything(tmp_path: Path) -> None:
    stage = Stage()
    kept(tmp_path, stage, stage.evidence(stage.honest[:1]))
    assert [path.name for path in tmp_path.iterdir()] == [STANDING_FILE]


def _forged(content: bytes) -> bytes:
    return content.replace(b'"case": "', b'"case": "AAAA')


@pytest.mark.parametrize("damage", [_forged, lambda content: content[:40], lambda _content: b"[]", lambda _content: b'{"case": 3}'])
def test_a_damaged_file_costs_one_conviction(tmp_path: Path, damage: object) -> None:
    stage = Stage()
    cases = kept(tmp_path, stage, stage.evidence(stage.honest))
    cases.hear(stage.evidence(stage.honest, step=4), stage.voters, 0.0)
    cases.rule(1.0, 1.0, 5)
    asyncio.run(CaseStore(tmp_path, cases).keep())
    files = sorted(tmp_path.glob("*.case"))
    assert len(files) == 2
    files[0].write_bytes(damage(files[0].read_bytes()))  # type: ignore[operator]
    (tmp_path / STANDING_FILE).write_text("no list")
    found = read(tmp_path, stage.honest[0].peer)
    assert [len(found.known), found.losers] == [1, {stage.liar.peer}]


def test_a_conviction_that_is_not_signed_or_that_its_voters_do_not_make_is_not_taken(tmp_path: Path) -> None:
    stage = Stage()
    kept(tmp_path, stage, stage.evidence(stage.honest))
    [file] = tmp_path.glob("*.case")
    document = json.loads(file.read_bytes())
    file.write_text(json.dumps({**document, "voters": [*document["voters"], *(f"other {number}" for number in range(9))]}))
    assert read(tmp_path, stage.honest[0].peer).known == {}
    right = stage.evidence(stage.honest)
    forged = replace(right, words=(*right.words[:2], replace(right.words[2], judge=stage.caller.peer)))
    kept(tmp_path, stage, forged)
    assert read(tmp_path, stage.honest[0].peer).known == {}


def test_what_is_forgotten_is_deleted_and_what_is_known_is_written_once(tmp_path: Path) -> None:
    stage = Stage()
    cases = kept(tmp_path, stage, stage.evidence(stage.honest))
    store = CaseStore(tmp_path, cases)
    store.read()
    [file] = tmp_path.glob("*.case")
    written_at = file.stat().st_mtime_ns
    asyncio.run(store.keep())
    assert file.stat().st_mtime_ns == written_at
    cases.known.clear()
    asyncio.run(store.keep())
    assert not list(tmp_path.glob("*.case"))
