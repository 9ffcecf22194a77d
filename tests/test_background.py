"""No error of a background task is lost: what is unexpected is logged with its traceback and counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import peerd
from peerd import background
from peerd.background import INTERNAL_ERRORS, MOST_LOGGED, Tasks, keep, start
from peerd.errors import PeerdError


async def _fail(error: Exception) -> None:
    raise error


@pytest.fixture
def before() -> int:
    return INTERNAL_ERRORS.count


async def test_an_unexpected_error_is_logged_with_its_traceback_and_counted(before: int) -> None:
    tasks = Tasks()
    with capture_logs() as logs:
        await asyncio.wait({tasks.start(_fail(TypeError("no part")))})
    (line,) = logs
    assert (line["log_level"], line["where"], line["error"]) == ("error", "_fail", "TypeError('no part')")
    assert "raise error" in line["exception"]
    assert INTERNAL_ERRORS.count == before + 1


async def test_an_expected_error_is_not_reported(before: int) -> None:
    with capture_logs() as logs:
        await asyncio.wait({start(_fail(ConnectionResetError("gone")), expects=(OSError,))})
    assert (logs, INTERNAL_ERRORS.count) == ([], before)


async def test_an_error_is_counted_once_however_many_tasks_it_passes_through(before: int) -> None:
    inner = start(_fail(TypeError("once")))

    async def outer() -> None:
        await inner

    await asyncio.wait({start(outer())})
    assert INTERNAL_ERRORS.count == before + 1


async def test_each_error_of_a_group_is_counted_once(before: int) -> None:
    known = TypeError("reported where it arose")
    INTERNAL_ERRORS.report("there", known)
    INTERNAL_ERRORS.report("here", ExceptionGroup("parts", [known, ExceptionGroup("more", [ValueError("new")])]))
    assert INTERNAL_ERRORS.count == before + 2


async def test_close_cancels_the_tasks_and_waits_for_their_end(before: int) -> None:
    tasks, ended = Tasks(), list[str]()

    async def run(name: str) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    started = [tasks.start(run(name)) for name in ("one", "two")]
    await asyncio.sleep(0)
    await tasks.close()
    assert sorted(ended) == ["one", "two"]
    assert all(task.cancelled() for task in started)
    assert INTERNAL_ERRORS.count == before


def test_no_other_module_starts_a_task_on_the_event_loop_itself() -> None:
    """A TaskGroup hears of its tasks' errors, and whoever uses `ensure_future` awaits what it returns."""
    sources = Path(peerd.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "loop().create_task" in path.read_text()] == ["background.py"]


async def test_a_part_that_a_bug_ends_runs_again(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(background, "LONGEST_PAUSE_S", 0.001)
    runs = list[int]()

    async def run() -> None:
        runs.append(len(runs))
        if len(runs) < 20:
            raise OverflowError("what another peer said")

    with capture_logs() as logs:
        await keep(run)
    assert runs == list(range(20))
    assert INTERNAL_ERRORS.count == before + 19
    assert len(logs) == MOST_LOGGED, "what shows again and again must not fill the log"


@pytest.mark.parametrize(
    "error", [PeerdError("meant"), ExceptionGroup("parts", [PeerdError("meant"), TypeError("a bug")]), KeyError("passes")]
)
async def test_an_error_that_is_meant_ends_a_part(error: Exception) -> None:
    runs = list[int]()

    async def run() -> None:
        runs.append(len(runs))
        raise error

    with pytest.raises(type(error)):
        await keep(run, passes=(KeyError,))
    assert runs == [0]
