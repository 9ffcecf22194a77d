"""A bug in what the stepper does is reported, and tried again or the end of the daemon: the run does not stand."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from peerd.background import INTERNAL_ERRORS
from peerd.policy.step import acts
from peerd.policy.step.acts import Act
from peerd.stage.executor import Executor
from peerd.stage.snapshots import Downloaded
from peerd.step import trials
from peerd.step.stepper import Stepper
from peerd.step.trials import MOST_ERRORS
from peerd.table.record import Lineage, PeerId
from tests.stage.test_half_way import Broken
from tests.step.test_commit import averaged

COMMIT = acts.Commit("all have averaged")
FETCH = acts.FetchAverage("a mate has the average", PeerId("mate"), 0)
RELOAD = acts.Reload("the stage is ahead", PeerId("mate"))


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepper]:
    monkeypatch.setattr(trials, "PAUSE_S", 0.001)
    executor = Executor()
    yield averaged(executor)
    executor.close()


def decides(stepper: Stepper, monkeypatch: pytest.MonkeyPatch, *decisions: Act) -> None:
    """These in turn; a commit is the last, after which it retires."""
    left = iter(decisions)
    monkeypatch.setattr(stepper, "_decide", lambda: next(left))
    monkeypatch.setattr(stepper._host, "committed", stepper._retiring.set)


def finds_donor(stepper: Stepper, monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any]) -> None:
    """It finds a donor for every reload, and downloads by `download`."""

    async def donor(*_arguments: Any) -> PeerId:
        return PeerId("mate")

    monkeypatch.setattr(stepper._fetching, "donor", donor)
    monkeypatch.setattr(stepper, "_downloader", type("Downloader", (), {"download": staticmethod(download)}))


async def fails(*_arguments: Any, **_options: Any) -> Any:
    raise TypeError("a bug")


def reported(logs: Sequence[Any]) -> list[tuple[str, str]]:
    return [(line["decision"], line["error"]) for line in logs if line["event"] == "internal error" and "TypeError" in line["exception"]]


async def test_an_act_that_changes_nothing_leaves_the_loop_to_others(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a round that is still being opened waits for nothing; its opening needs the loop to go on."""

    async def nothing(*_arguments: Any) -> None:
        return

    monkeypatch.setattr(stepper, "_decide", lambda: acts.CloseRound("a member left the round"))
    monkeypatch.setattr(stepper, "_do", nothing)
    waited = asyncio.Event()

    async def changed(_wait_s: float) -> None:
        waited.set()
        await asyncio.sleep(0.001)

    monkeypatch.setattr(stepper, "_membership", SimpleNamespace(changed=changed, is_quiet=False))
    running = asyncio.create_task(stepper.run())
    async with asyncio.timeout(20):
        await waited.wait()
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("decision", [FETCH, RELOAD])
async def test_a_download_with_a_bug_fails_at_once_and_the_stepper_goes_on(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch, decision: Act
) -> None:
    before = INTERNAL_ERRORS.count
    decides(stepper, monkeypatch, decision, decision, acts.Serve("equal to the stage") if decision is RELOAD else COMMIT)
    monkeypatch.setattr(stepper._rounds.fetcher, "fetch", fails)
    finds_donor(stepper, monkeypatch, fails)
    monkeypatch.setattr(stepper._state, "serve", stepper._retiring.set)
    with capture_logs() as logs:
        async with asyncio.timeout(10):
            await stepper.run()
    assert reported(logs) == [(decision.reason, "TypeError('a bug')")] * 2
    assert INTERNAL_ERRORS.count == before + 2


async def test_a_commit_with_a_bug_ends_the_daemon_for_the_parameters_may_be_half_updated(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(*_arguments: Any) -> Any:
        raise TypeError("a bug")

    monkeypatch.setattr(stepper._state, "commit", commit)
    decides(stepper, monkeypatch, COMMIT, COMMIT)
    with capture_logs() as logs, pytest.raises(TypeError):
        await stepper.run()
    assert reported(logs) == [(COMMIT.reason, "TypeError('a bug')")]


async def test_a_state_that_is_half_loaded_ends_the_daemon(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve by J1 (join) what is partly another step's, once its mates are gone."""
    state = stepper._state
    tensors = {name: torch.ones_like(value) for name, value in state.holdings.tensors(state.record).items()}
    last = max(name for name in tensors if name.startswith("parameters/"))
    tensors[last] = tensors[last].as_subclass(Broken)

    async def download(*_arguments: Any) -> Downloaded:
        return Downloaded(3, Lineage(), tensors, ())

    finds_donor(stepper, monkeypatch, download)
    decides(stepper, monkeypatch, RELOAD, acts.Serve("nobody is ahead"))
    monkeypatch.setattr(stepper._state, "serve", stepper._retiring.set)
    with capture_logs(), pytest.raises(RuntimeError, match="the device has failed"):
        await stepper.run()
    assert any(bool((parameter == 1).all()) for parameter in state.holdings.module.parameters())


async def test_a_bug_that_stays_ends_the_daemon(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    before = INTERNAL_ERRORS.count
    decides(stepper, monkeypatch, *[FETCH] * (MOST_ERRORS + 1))
    monkeypatch.setattr(stepper._rounds.fetcher, "fetch", fails)
    with pytest.raises(TypeError):
        await stepper.run()
    assert INTERNAL_ERRORS.count == before + MOST_ERRORS


async def test_a_decision_with_a_bug_is_made_again(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    before = INTERNAL_ERRORS.count
    decides(stepper, monkeypatch, COMMIT)
    decide, asked = stepper._decide, list[None]()

    def first_fails() -> Act:
        asked.append(None)
        if len(asked) <= 2 * MOST_ERRORS:
            raise TypeError("a bug that the record of another peer shows")
        return decide()

    async def changed(_wait_s: float) -> None:
        return

    monkeypatch.setattr(stepper, "_decide", first_fails)
    monkeypatch.setattr(stepper, "_membership", SimpleNamespace(changed=changed, is_quiet=False))
    async with asyncio.timeout(10):
        await stepper.run()
    assert stepper._state.record.step == 1
    assert INTERNAL_ERRORS.count == before + 2 * MOST_ERRORS, "and the daemon lives"


@pytest.mark.parametrize("decision", [COMMIT, FETCH], ids=["update", "fetch"])
async def test_too_little_memory_is_no_bug_and_what_held_tensors_is_let_go_of(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch, decision: Act
) -> None:
    """The stage is left, and may be served again once there is memory: not if an error keeps the memory."""
    kept: list[weakref.ref[torch.Tensor]] = []

    async def acts_in_vain(_act: Act) -> None:
        large = torch.zeros(1000)
        kept.append(weakref.ref(large))
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(stepper, "_decide", lambda: decision)
    monkeypatch.setattr(stepper, "_do", acts_in_vain)
    before = INTERNAL_ERRORS.count
    with pytest.raises(torch.OutOfMemoryError) as raised:
        await asyncio.wait_for(stepper.run(), 20)
    assert INTERNAL_ERRORS.count == before
    assert kept[0]() is None, raised
