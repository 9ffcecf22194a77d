"""A joiner compares what it has downloaded with what its mates hold, at whatever steps they are: rule 21 (prove)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from peerd.policy.step.joining import JoinPlan
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.stage.download import SketchAnswer
from peerd.stage.sketches import sketch_of
from peerd.step import proving
from peerd.step.proving import Proving
from peerd.swarm.clock import clock_s
from peerd.table.record import PeerId, Phase
from tests.strategies import member, view_of

RULES = StepRules(num_stages=1, num_microbatches=4, ttl_s=3.0, averaging_s=1.5, certifies=True)
FIRST, UPDATE = torch.randn(100, generator=torch.Generator().manual_seed(1)), torch.randn(100, generator=torch.Generator().manual_seed(2))
FALSE = -1.0


class Stage:
    """Mates at some steps. Each holds the same parameters of a step, times its factor."""

    def __init__(self, steps: dict[str, int], factors: dict[str, float], own_step: int) -> None:
        self.steps, self.factors, self.own_factor = steps, factors, factors["a"]
        self.busy: set[str] = set()
        self.gone: set[str] = set()
        self.slow: set[str] = set()
        """They have not answered yet."""
        self.asked: list[str] = []
        self.record = member("me", step=own_step, phase=Phase.JOINING)
        downloader: Any = SimpleNamespace(
            givers={"a"}, sketch=self.sketch, distrust=lambda givers, _for_s: self.asked.append(f"no {sorted(givers)}")
        )
        membership: Any = SimpleNamespace(view=SimpleNamespace(ttl_s=3.0), wake=lambda: None)
        state: Any = SimpleNamespace(record=self.record, holdings=SimpleNamespace(sketch=self.own_sketch))
        self.state = state
        self.proving = Proving(state, self, membership, downloader, RULES)  # type: ignore[arg-type]

    async def run(self, _priority: object, job: Any) -> Any:
        return job()

    def own_sketch(self, record: Any, seed: bytes, _previous: bool) -> Any:
        return sketch_of({"parameters/w": self.own_factor * (FIRST + record.step * UPDATE)}, seed)

    async def sketch(self, mate: PeerId, _stage: int, seed: bytes, _previous: bool) -> SketchAnswer:
        self.asked.append(mate)
        if mate in self.slow:
            await asyncio.Event().wait()
        if mate in self.busy | self.gone:
            return SketchAnswer(None, 0.0, is_busy=mate in self.busy)
        step = self.steps[mate]
        sums = sketch_of({"parameters/w": self.factors[mate] * (FIRST + step * UPDATE)}, seed).to_bytes()
        return SketchAnswer((step, sums), 0.0)

    async def look(self, after_s: float = 0.0) -> OwnState:
        """What is known once all that were asked have answered."""
        await self.proving.keep_up()
        for _ in range(3):
            mine = self.state.record
            mates = [member(name, step=step) for name, step in self.steps.items()]
            own = OwnState(record=mine)
            found = self.proving.noted(own, Situation(own, replace(view_of(mine, *mates), me=mine.peer), clock_s() + after_s, RULES))
            await asyncio.sleep(0)
            await asyncio.sleep(0.02)
        return found

    async def catch_up(self, step: int) -> OwnState:
        self.state.record = replace(self.record, step=step)
        return await self.look()


async def test_mates_at_other_steps_prove_a_state_as_soon_as_the_joiner_has_come_through_them() -> None:
    stage = Stage({"a": 5, "b": 6, "c": 7}, {"a": 1.0, "b": 1.0, "c": 1.0 + 1e-7}, own_step=5)
    stage.proving.begin()
    assert (await stage.look()).unproven, "the others are ahead, and have told their states of later steps"
    assert not (await stage.catch_up(6)).unproven, "two of three hold it"
    asked = len(stage.asked)
    assert not (await stage.look()).unproven
    assert len(stage.asked) == asked, "nothing is asked any more"


@pytest.mark.parametrize("factor", [FALSE, 1.01])
async def test_a_made_up_state_is_found_and_its_givers_are_asked_no_more(factor: float) -> None:
    stage = Stage({"a": 5, "b": 5, "c": 5}, {"a": factor, "b": 1.0, "c": 1.0}, own_step=5)
    stage.proving.begin()
    found = await stage.look()
    assert "most of the stage hold another state" in found.disproved
    stage.proving.give_up(found.disproved)
    assert stage.asked[-1] == "no ['a']"
    assert stage.proving.given_up == 1
    assert found.disproved in stage.proving.planned(JoinPlan(None, "")).text
    assert (await stage.look()).disproved == ""


async def test_a_plan_tells_that_a_state_was_refused_until_another_one_is_proven() -> None:
    stage, plan = Stage({"a": 5, "b": 5, "c": 5}, {"a": 1.0, "b": 1.0, "c": 1.0}, own_step=5), JoinPlan(3.0, "ready in about 3.0 s")
    stage.proving.give_up("most hold another one")
    assert stage.proving.planned(plan) == JoinPlan(3.0, "ready in about 3.0 s; it has refused a state: most hold another one")
    stage.proving.begin()
    assert not (await stage.look()).unproven
    assert stage.proving.planned(plan) == plan


async def test_a_liar_that_is_not_the_giver_changes_nothing() -> None:
    stage = Stage({"a": 5, "b": 5, "c": 5}, {"a": 1.0, "b": FALSE, "c": 1.0}, own_step=5)
    stage.proving.begin()
    assert await stage.look() == OwnState(record=stage.record)


async def test_a_mate_that_is_busy_is_asked_again_and_one_that_is_gone_is_not_waited_for_long() -> None:
    stage = Stage({"a": 5, "b": 5}, {"a": 1.0, "b": 1.0}, own_step=5)
    stage.busy = {"b"}
    stage.proving.begin()
    assert (await stage.look()).unproven
    stage.busy, stage.gone = set(), {"b"}
    assert (await stage.look()).unproven
    assert not (await stage.look(after_s=60.0)).unproven


async def test_a_mate_is_asked_once_until_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be making the sketch. If it was asked again for the next one, others would wait for that."""
    stage = Stage({"a": 5, "b": 5}, {"a": 1.0, "b": 1.0}, own_step=5)
    stage.slow = {"b"}
    stage.proving.begin()
    await stage.look()
    monkeypatch.setattr(proving, "clock_s", lambda: clock_s() + 60.0)
    await stage.look()
    assert stage.asked == ["b"]


async def test_a_state_ahead_of_all_mates_is_given_up_after_a_while() -> None:
    stage = Stage({"a": 9, "b": 5, "c": 5}, {"a": 1.0, "b": 1.0, "c": 1.0}, own_step=9)
    stage.steps["a"] = 5
    stage.proving.begin()
    assert (await stage.look()).unproven
    assert (await stage.look(after_s=60.0)).disproved


async def test_hole_71_where_nobody_can_say_which_state_is_right_a_joiner_keeps_its_own_and_says_why_it_does_not_serve() -> None:
    stage = Stage({"a": 5, "b": 5}, {"a": 1.0, "b": FALSE}, own_step=5)
    stage.proving.begin()
    assert (await stage.look()).unproven, "the second may still say something else"
    assert stage.proving.disputed == ""
    with capture_logs() as logs:
        found = await stage.look(after_s=11.0)
    assert (found.disproved, found.unproven) == ("", stage.proving.disputed)
    assert "2 peers of this stage (a, b) hold unlike states" in found.unproven
    assert stage.proving.planned(JoinPlan(0.0, "ready in about 0 s")) == JoinPlan(None, found.unproven)
    (told,) = [log for log in logs if log["log_level"] == "warning"]
    assert (told["event"], told["reason"]) == ("this peer does not serve", found.unproven)
    await stage.look(after_s=21.0)
    stage.asked.clear()
    assert (await stage.look()).unproven == found.unproven, "it says so as long as it compares again"
    assert {"a", "b"} == set(stage.asked), "the giver too may hold something else by now"


@pytest.mark.parametrize(("gone", "is_right"), [("a", False), ("b", True)])
async def test_a_dispute_ends_once_one_of_the_two_is_gone(gone: str, is_right: bool) -> None:
    stage = Stage({"a": 5, "b": 5}, {"a": 1.0, "b": FALSE}, own_step=5)
    stage.proving.begin()
    await stage.look()
    assert (await stage.look(after_s=11.0)).unproven
    del stage.steps[gone]
    found = await stage.look(after_s=11.0)
    assert (not found.unproven, not found.disproved) == (True, is_right)
    if not is_right:
        stage.proving.give_up(found.disproved)
        assert stage.asked[-1] == "no ['a']"
    assert stage.proving.disputed == ""


async def test_hole_74_the_word_of_a_lying_giver_is_not_enough_while_its_mates_are_busy() -> None:
    stage = Stage({"a": 5, "b": 5, "c": 5}, {"a": FALSE, "b": 1.0, "c": 1.0}, own_step=5)
    stage.busy = {"b", "c"}
    stage.proving.begin()
    assert (await stage.look()).unproven
    assert (await stage.look(after_s=30.0)).unproven
    stage.busy = set()
    assert (await stage.look()).disproved
