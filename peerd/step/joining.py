"""What a joiner measures of its own join, and the plan that follows from it (`policy/step/joining.py`)."""

from __future__ import annotations

from collections import deque

import structlog

from peerd.policy.step.joining import TIMED, JoinPlan, JoinProgress, StagePace, can_catch_up, pause_s, plan_of
from peerd.policy.step.ledger import stage_step
from peerd.stage.download import Downloader
from peerd.stage.state import StageState
from peerd.table.view import LiveView

LOG = structlog.get_logger()


class Joining:
    """The joins of one peer in its stage. Times are seconds on the caller's clock."""

    def __init__(self, state: StageState, downloader: Downloader) -> None:
        self._state = state
        self._downloader = downloader
        self._pace = StagePace()
        self._averages_s: deque[float] = deque(maxlen=TIMED)
        self._began_s: float | None = None
        """When the present attempt began."""
        self._behind_first = 0
        """How many steps it was behind after its download."""
        self._waits_until_s: float | None = None
        """Until when it waits, as it cannot catch up; None: it does not wait."""

    def downloads(self, now_s: float) -> None:
        """A new attempt begins, with a download."""
        self._averages_s.clear()
        self._began_s, self._behind_first, self._waits_until_s = now_s, 0, None

    def applied(self, took_s: float) -> None:
        """An average was fetched and applied in so many seconds."""
        self._averages_s.append(took_s)

    @property
    def waits(self) -> bool:
        """Whether it asks for nothing now, as it cannot catch up."""
        return self._waits_until_s is not None

    def why_wait(self, live: LiveView, now_s: float) -> str:
        """Why this joiner asks for nothing now, as it cannot catch up; empty if it can, or if it is time to try again."""
        self._look(live, now_s)
        if not self._averages_s:
            self._began_s = now_s if self._began_s is None else self._began_s
            self._behind_first = self._behind(live, self._state.record.step)
            return ""
        progress = self.progress(live, now_s)
        if self._waits_until_s is None and self._tries_in_vain(progress):
            tried_s = now_s - (now_s if self._began_s is None else self._began_s)
            self._waits_until_s = now_s + pause_s(tried_s)
            LOG.warning("this joiner cannot catch up", plan=plan_of(progress).text, waits_s=round(pause_s(tried_s)))
        if self._waits_until_s is None:
            return ""
        if now_s < self._waits_until_s and not can_catch_up(progress):
            return plan_of(progress).text
        self.downloads(now_s)
        return ""

    def plan(self, live: LiveView, now_s: float) -> JoinPlan:
        """When it will serve, as far as is known."""
        if not self._averages_s and not self._downloader.bytes_total:
            return JoinPlan(None, "")
        return plan_of(self.progress(live, now_s))

    def progress(self, live: LiveView, now_s: float) -> JoinProgress:
        """Where it stands now."""
        self._look(live, now_s)
        under_way, times_s, step = self._downloader, self._averages_s, self._state.record.step
        return JoinProgress(
            bytes_left=max(0, under_way.bytes_total - under_way.bytes_done),
            bytes_total=under_way.bytes_total,
            rate=under_way.rate,
            steps_behind=self._behind(live, step if under_way.step is None else under_way.step),
            step_s=self._pace.step_s(now_s),
            average_bytes=self._state.accumulator.flat.nbytes,
            average_s=sum(times_s) / len(times_s) if len(times_s) > 1 else None,
        )

    def _look(self, live: LiveView, now_s: float) -> None:
        newest = stage_step(live, self._state.record.stage)
        if newest is not None:
            self._pace.saw(newest, now_s)

    def _behind(self, live: LiveView, step: int) -> int:
        """How many steps the stage is ahead of this one."""
        return max(0, (stage_step(live, self._state.record.stage) or 0) - step)

    def _tries_in_vain(self, progress: JoinProgress) -> bool:
        """Whether it has come no nearer to its stage with several averages, each of which took as long as a step."""
        return len(self._averages_s) == TIMED and not can_catch_up(progress) and progress.steps_behind >= self._behind_first
