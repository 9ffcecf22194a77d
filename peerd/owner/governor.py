"""The owner's say in the daemon: keeps the limits, reads the sensors, and tells when this peer pauses and when it goes on.

It outlives stages and pauses. What may be done when is decided in policy/owner/governor.py. Daemons of several devices share the limits
file: each notices within one look what the owner told another one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog
import torch

from peerd.config.device_homes import every_home
from peerd.config.limits import Wishes, load_wishes, owner_info, save_wishes, stamp_of
from peerd.config.paths import Home
from peerd.control.protocol import SCHEMA
from peerd.control.server import Say, Verb
from peerd.control.teller import Teller
from peerd.errors import PeerdError
from peerd.link.throttle import Throttles
from peerd.owner.priority import niceness
from peerd.owner.sensors import Sensors
from peerd.owner.usage import Usage
from peerd.policy.owner.governor import Limits, Pause, PauseVerdict, duty_within, judge, why_pause
from peerd.unwritten import UNWRITTEN

LOOK_PERIOD_S = 2.0
LOOKS_PER_NOTE = 30
LIMITS = "limits"
LOG = structlog.get_logger()


class Governor:
    """One daemon's."""

    def __init__(
        self, home: Home, device: torch.device, owner_home: Home | None = None, sharers: int = 1, usual: Limits | None = None
    ) -> None:
        """`owner_home` holds the limits, which are divided among `sharers` daemons; None: this daemon's home does.

        `usual` holds until the owner sets a limit; None: everything is allowed.
        """
        self._usual = usual or Limits()
        self._home = owner_home or home
        self._seen = stamp_of(self._home)
        self._wishes = load_wishes(self._home, self._usual)
        self._sharers = sharers
        self.device = device
        self._sensors = Sensors(device, has_neighbours=sharers > 1)
        self._usage = Usage(home, [each for each in every_home(self._home) if each != home])
        self._counted = 0
        self._verdict = PauseVerdict()
        self._changed = asyncio.Event()
        self.throttles = Throttles()
        self._resting = False
        self._duty = self.limits.duty
        self._has_new_limits = asyncio.Event()
        self._apply()

    @property
    def limits(self) -> Limits:
        """This daemon's part of what the owner allows."""
        return self._wishes.limits.shared(self._sharers)

    @property
    def in_force(self) -> Limits:
        """With the share of the time that keeps the GPU within its power."""
        return replace(self.limits, duty=self._duty)

    async def new_limits(self) -> Limits:
        """Those in force, once they have changed since this was last asked."""
        await self._has_new_limits.wait()
        self._has_new_limits.clear()
        return self.in_force

    @property
    def pause(self) -> Pause | None:
        """Why this peer shall not work now."""
        return self._verdict.pause

    async def run(self) -> None:
        """Looks again and again until cancelled."""
        looks = 0
        try:
            while True:
                await self.look()
                looks += 1
                if looks % LOOKS_PER_NOTE == 0:
                    await asyncio.to_thread(self._save)
                await asyncio.sleep(LOOK_PERIOD_S)
        finally:
            self._usage.save()

    async def look(self) -> None:
        """Read the sensors and judge anew."""
        self._read_wishes()
        moved = self.throttles.upload.total + self.throttles.download.total
        self._usage.add(moved - self._counted)
        self._counted = moved
        limits, usage = self.limits, self._usage
        asked = (limits, usage.today, usage.this_month)
        looks = self._sensors.has_to_look(limits)
        readings = await asyncio.to_thread(self._sensors.read, *asked) if looks else self._sensors.read(*asked)
        self._keep_duty(duty_within(self.limits, self._duty, readings.power))
        self._judge(self._asked() or why_pause(limits, readings, paused=self.pause is not None))

    def _keep_duty(self, duty: float) -> None:
        if duty != self._duty:
            self._duty = duty
            self._has_new_limits.set()

    def _asked(self) -> Pause | None:
        """The owner's own word, which may have run out."""
        wishes = self._wishes
        if wishes.paused and wishes.paused_until_s and time.time() >= wishes.paused_until_s:
            self._keep(wishes.after("resume", {}))
        return self._wishes.pause

    def _judge(self, found: Pause | None) -> None:
        before, self._verdict = self.pause, judge(self._verdict, found, time.monotonic())
        if self.pause == before:
            return
        if self.pause is None:
            LOG.info("going on")
        elif before is None:
            LOG.info("pausing", reason=self.pause.reason, until=self.pause.until)
        self._changed.set()

    async def until_paused(self) -> None:
        """Returns when this peer shall stop working."""
        await self._until(lambda: self.pause is not None)

    async def until_free(self) -> None:
        """Returns when it may go on."""
        await self._until(lambda: self.pause is None)

    def rest(self, yes: bool) -> None:
        """The daemon has left its stage, or serves one again."""
        self._resting = yes
        self._changed.set()

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._changed.clear()
            await self._changed.wait()

    def verbs(self) -> dict[str, Verb]:
        return {verb: functools.partial(self.obey, verb) for verb in ("pause", "resume", "limits")}

    async def obey(self, verb: str, request: Mapping[str, Any], say: Say | None = None) -> Mapping[str, Any]:
        """Answer a verb of the control socket. `pause` returns once the daemon has handed on what it held, unless `wait` is false."""
        self._read_wishes()
        self._keep(self._wishes.after(verb, request))
        await self.look()
        if verb == "pause" and request.get("wait", True):
            rested = self._until(lambda: self._resting or self.pause is None)
            await (rested if say is None else Teller(say, "handing on what it holds").through(rested))
        return {"schema": SCHEMA, **self.fields()}

    def fields(self) -> dict[str, Any]:
        """For replies: the limits, what was used of the quotas, and why this peer pauses."""
        usage = self._usage
        info = owner_info(self._wishes.limits, self.pause, today=usage.today, this_month=usage.this_month, resting=self._resting)
        return {**info, "nice": niceness()}

    def _keep(self, wishes: Wishes) -> None:
        if wishes != self._wishes:
            self._take(wishes)
            self._save_wishes()

    def _take(self, wishes: Wishes) -> None:
        before, self._wishes = self._wishes, wishes
        if wishes.limits != before.limits:
            self._apply()

    def _read_wishes(self) -> None:
        """Take over what another process has written. A file that cannot be understood changes nothing."""
        seen = stamp_of(self._home)
        if seen == self._seen or LIMITS in UNWRITTEN:
            return
        self._seen = seen
        try:
            self._take(load_wishes(self._home, self._usual))
        except PeerdError as error:
            LOG.warning("the owner's limits cannot be read; those known hold", error=error.message)

    def _save(self) -> None:
        self._usage.save()
        self._usage.read_others()
        if LIMITS in UNWRITTEN:
            self._save_wishes()

    def _save_wishes(self) -> None:
        with UNWRITTEN.trying(LIMITS, self._home.limits):  # the owner's word holds all the same
            save_wishes(self._home, self._wishes)
        self._seen = stamp_of(self._home)

    def _apply(self) -> None:
        self.throttles.upload.rate = self.limits.upload
        self.throttles.download.rate = self.limits.download
        self._duty = min(self._duty, self.limits.duty) if self.limits.power else self.limits.duty
        self._has_new_limits.set()
