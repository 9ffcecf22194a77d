"""When a machine that its owner also uses may work for the swarm: limits, what was measured, and the verdict with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MINUTES_A_DAY = 24 * 60
BUSY_SHARE = 0.25
"""Share of all cores that other programs may take before the machine counts as in use."""
QUIET_SHARE = 0.6
"""A paused peer goes on only below this share of the threshold that paused it, so that it does not come and go."""
COOL_DOWN_C = 8.0
POWER_GAIN = 0.1
"""Share of the wanted change, on a logarithmic scale, that one reading makes: readings are averages and lag behind."""
LEAST_DUTY = 0.01
INFERENCE_SHARE = 0.02
QUIET_S = 60.0
"""How long every sensor must be quiet before a paused peer goes on."""


@dataclass(frozen=True, slots=True)
class Hours:
    """A daily span of local time, [start, end) in minutes after midnight; it may run over midnight."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not (0 <= self.start < MINUTES_A_DAY and 0 <= self.end < MINUTES_A_DAY and self.start != self.end):
            raise ValueError("hours are two different times of day, like 22:00-07:00")

    def holds(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this machine's owner allows. Zero and empty: no limit."""

    upload: float = 0.0
    """Bytes per second, all RPC together."""
    download: float = 0.0
    daily: int = 0
    """Bytes up and down per calendar day."""
    monthly: int = 0
    memory: int = 0
    """Bytes a stage may take on the device."""
    disk: int = 0
    """Bytes that a run's checkpoints may take; the newest stays even so."""
    duty: float = 1.0
    """Share of the time that the device computes, above 0 and up to 1."""
    inference: float = INFERENCE_SHARE
    """Share of the time for which training waits for passes of those who ask the model something; 0: no such passes."""
    power: float = 0.0
    """Watts that the GPU may draw on average; it computes a smaller share of the time where it would draw more."""
    hours: Hours | None = None
    max_temperature: float = 0.0
    """Degrees Celsius of the hottest sensor."""
    while_used: bool = True
    """Go on while somebody works at the machine or other programs keep it busy."""
    on_battery: bool = True
    on_metered: bool = True

    def __post_init__(self) -> None:
        for name in ("upload", "download", "daily", "monthly", "memory", "disk", "power", "max_temperature"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must not be negative")
        if not LEAST_DUTY <= self.duty <= 1.0:
            raise ValueError("duty must be between 1% and 100%")
        if not 0 <= self.inference <= 1.0:
            raise ValueError("inference must be between 0% and 100%")

    def shared(self, sharers: int) -> Limits:
        """What one of several daemons of a machine may take: an equal part of the rates, the power and the disk.

        Memory and duty are those of each device. Quotas are compared with what all daemons have moved.
        """
        return replace(
            self,
            upload=self.upload / sharers,
            download=self.download / sharers,
            power=self.power / sharers,
            disk=-(-self.disk // sharers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What was measured; None where this machine does not tell."""

    minute: int
    """Minute of the day, local time."""
    today: int = 0
    """Bytes moved since midnight."""
    this_month: int = 0
    others_share: float | None = None
    """Share of all cores that other programs take."""
    gpu_shared: bool | None = None
    """Another program computes on the device."""
    input_idle: bool | None = None
    """Nobody touched keyboard or mouse for a while."""
    on_battery: bool | None = None
    on_metered: bool | None = None
    temperature: float | None = None
    power: float | None = None
    """Watts that the GPU drew lately."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Why this peer does not work, and when it goes on as far as that is known."""

    reason: str
    until: str
    sensed: bool = False
    """True if a sensor caused it, whose value may change again: the peer waits until it has been quiet for a while."""


@dataclass(frozen=True, slots=True)
class PauseVerdict:
    """Whether to work, and since when nothing has spoken against going on (the caller's clock)."""

    pause: Pause | None = None
    quiet_since_s: float | None = None


def judge(before: PauseVerdict, found: Pause | None, now_s: float) -> PauseVerdict:
    """A pause takes effect at once. After a pause that a sensor caused, the peer goes on when a minute was quiet."""
    if found is not None or before.pause is None or not before.pause.sensed:
        return PauseVerdict(found)
    since_s = now_s if before.quiet_since_s is None else before.quiet_since_s
    return PauseVerdict() if now_s - since_s >= QUIET_S else PauseVerdict(before.pause, since_s)


def why_pause(limits: Limits, readings: Readings, paused: bool = False) -> Pause | None:
    """The first limit that forbids working now. For a `paused` peer the thresholds are lower."""
    if limits.hours is not None and not limits.hours.holds(readings.minute):
        return Pause("it is outside the hours allowed", f"at {clock(limits.hours.start)}")
    if limits.monthly and readings.this_month >= limits.monthly:
        return Pause("this month's data quota is used up", "on the first of next month")
    if limits.daily and readings.today >= limits.daily:
        return Pause("today's data quota is used up", "at midnight")
    if not limits.on_battery and readings.on_battery:
        return Pause("the machine runs on battery", "when it is plugged in, or after `peerd limits --on-battery run`")
    if not limits.on_metered and readings.on_metered:
        return Pause("the network connection is metered", "on another connection, or after `peerd limits --metered run`")
    return _too_hot(limits, readings, paused) or _in_use(limits, readings, paused)


def duty_within(limits: Limits, duty: float, power: float | None) -> float:
    """The share of the time to compute from now on, after `power` watts were drawn with a share of `duty`.

    The GPU's power at rest is not known, so this is one step in the right direction; later readings take the next.
    """
    if not limits.power or not power:
        return limits.duty
    return min(limits.duty, max(LEAST_DUTY, duty * math.pow(limits.power / power, POWER_GAIN)))


def _too_hot(limits: Limits, readings: Readings, paused: bool) -> Pause | None:
    allowed = limits.max_temperature - (COOL_DOWN_C if paused else 0.0)
    if not limits.max_temperature or readings.temperature is None or readings.temperature <= allowed:
        return None
    return Pause(f"the machine is at {readings.temperature:.0f} degrees", f"below {limits.max_temperature - COOL_DOWN_C:.0f} degrees", True)


def _in_use(limits: Limits, readings: Readings, paused: bool) -> Pause | None:
    if limits.while_used:
        return None
    until = "when it is free again, or after `peerd limits --while-used run`"
    if readings.gpu_shared:
        return Pause("another program uses the GPU", until, True)
    share = BUSY_SHARE * (QUIET_SHARE if paused else 1.0)
    if readings.others_share is not None and readings.others_share > share:
        return Pause(f"other programs use {readings.others_share:.0%} of the processor", until, True)
    if readings.input_idle is False:
        return Pause("somebody works at this machine", until, True)
    return None


def clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
