"""A sample of what the model says is asked for once after each evaluation, and costs nothing where it cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from peerd.control.server import Say
from peerd.daemon.peer import Peer
from peerd.daemon.watching import sample
from peerd.daemon.watching.sample import Sampler
from peerd.errors import PeerdError, UnreachableError, UsageError
from peerd.table.record import Evaluation


class Swarm:
    """Answers each question in turn with the next of these; the last one stays."""

    def __init__(self, *answers: str | PeerdError) -> None:
        self.answers = list(answers)
        self.asked: list[Mapping[str, Any]] = []
        self.training = SimpleNamespace(evaluation=None)
        seat, settings = SimpleNamespace(training=self.training), SimpleNamespace(sample="The sea ")
        place = SimpleNamespace(manifest=SimpleNamespace(swarm=SimpleNamespace(announce_period_s=0.0)))
        self.peer = SimpleNamespace(seat=seat, settings=settings, place=place, patience_s=0.0, is_resting=False)
        self.sampler = Sampler(cast(Peer, self.peer), self.ask)

    async def ask(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, PeerdError):
            raise answer
        return {"text": answer, "steps": [4, 5]}

    async def runs(self, looks: int = 40) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self.sampler.run())
        await self.looks(looks)
        return task

    async def looks(self, number: int = 40) -> None:
        for _ in range(number):
            await asyncio.sleep(0)


async def test_each_evaluation_is_followed_by_one_text() -> None:
    swarm = Swarm("was blue", "was red")
    task = await swarm.runs()
    assert swarm.asked == []
    for step, text in ((5, "was blue"), (10, "was red")):
        swarm.training.evaluation = Evaluation(step, 3.0)
        await swarm.looks()
        assert swarm.sampler.newest == {"step": 5, "prompt": "The sea ", "text": text}
    assert [each["seed"] for each in swarm.asked] == [5, 10]
    assert all(each["prompt"] == "The sea " and each["max_tokens"] == sample.MOST_TOKENS for each in swarm.asked)
    task.cancel()


async def test_it_asks_again_where_the_swarm_does_not_answer_and_not_during_a_pause() -> None:
    swarm = Swarm(UnreachableError("nobody"), UnreachableError("nobody"), "was blue")
    swarm.training.evaluation, swarm.peer.is_resting = Evaluation(5, 3.0), True
    task = await swarm.runs()
    assert swarm.asked == []
    swarm.peer.is_resting = False
    await swarm.looks()
    assert len(swarm.asked) == 3
    assert swarm.sampler.newest is not None
    task.cancel()


async def test_it_ends_where_the_model_cannot_go_on_and_without_a_text_to_go_on_from() -> None:
    for swarm, text in ((Swarm(UsageError("a list of blocks does not go on from a text")), "The sea "), (Swarm("x"), "")):
        swarm.peer.settings.sample = text
        swarm.training.evaluation = Evaluation(5, 3.0)
        task = await swarm.runs()
        assert task.done()
        assert swarm.sampler.newest is None
