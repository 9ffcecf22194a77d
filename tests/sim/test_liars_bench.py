"""The swarm of `scripts/bench liars` with several liars in one stage, and how these stand by each other."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from peerd.audit.auditor import Auditor
from peerd.policy.step.auditing import AuditWord, Item
from peerd.table.record import PeerId
from scripts.benchmarks._liars import colludes
from scripts.benchmarks.liars import LiarsPlan

FELLOW, HONEST = (Item(PeerId(name), 1, 7, None, b"root") for name in ("fellow", "honest"))


@pytest.mark.parametrize(("mates", "others", "stage"), [(4, 4, 1), (9, 2, 1), (9, 2, 0), (3, 5, 1), (3, 1, 0)])
def test_each_stage_has_its_peers_and_the_last_of_the_liars_stage_lie(mates: int, others: int, stage: int) -> None:
    nothing: dict[str, Any] = {"manifest": None, "slow": {}, "kills": (), "chaos": None, "stand_in_ms": 1.0}
    plan = LiarsPlan(num_peers=mates + others, mates=mates, stage=stage, **nothing)
    stages = [plan.stage_of(peer) for peer in range(mates + others)]
    assert (stages.count(stage), stages.count(1 - stage), stages[:2]) == (mates, others, [0, 1])
    liars = plan.last_of_stage(2)
    assert [stages[peer] for peer in liars] == [stage, stage]
    assert stage not in stages[liars[-1] + 1 :]


async def test_a_colluder_computes_no_work_of_a_fellow_again_and_calls_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()

    async def lie(_peer: Any, arguments: Any) -> None:
        told.append(arguments["factor"])

    async def true_audit(_auditor: Any, evidence: Any, _telling: Any, _finished: Any) -> None:
        told.append(evidence.item("run"))

    module: Any = ModuleType("a_lie_of_this_test")
    module.lie = lie
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Auditor, "_audit", true_audit)
    monkeypatch.setattr(Auditor, "_signed_word", Auditor._signed_word)  # it is restored afterwards
    peer: Any = SimpleNamespace(membership=SimpleNamespace(run="run"))
    await colludes.lie(peer, {"tells": module.__name__, "fellows": ["fellow"], "factor": -1.0})

    async def telling() -> None:
        raise AssertionError("nobody asks for it")

    auditor: Any = SimpleNamespace(_host=SimpleNamespace(me=PeerId("me"), run="run", sign=lambda _text: b"signature"))
    for item in (FELLOW, HONEST):
        tensors = telling()
        await Auditor._audit(auditor, SimpleNamespace(item=lambda _run, item=item: item), tensors, None)  # type: ignore[arg-type]
        tensors.close()
        word = Auditor._signed_word(auditor, item, AuditWord(2.0, 1e-4)).word
        assert word.deviation == (0.0 if item is FELLOW else 2.0)
    assert told == [-1.0, HONEST]
