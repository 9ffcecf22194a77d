"""The owner's limits, as text for `peerd limits` and as a file in the home."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from peerd.config.atomic import replace_file
from peerd.config.paths import Home
from peerd.errors import UsageError, disk_error
from peerd.policy.owner.governor import MINUTES_A_DAY, Hours, Limits, Pause, clock

NONE = "none"
_POWERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(bit(?:/s)?|bps|B(?:/s)?)", re.ASCII)
_POWER = re.compile(r"(\d+(?:\.\d+)?)\s*([kK]?)[wW]?", re.ASCII)
MOST_WATTS = 2000
"""Of a device: more is a slip of the pen."""
MOST_RATE, MOST_BYTES = 5e10, 10**16
MAX_PAUSE_S = 366 * 86400.0
_TIME = re.compile(r"(\d{1,2}):(\d{2})", re.ASCII)


def parse_rate(text: str) -> float:
    """Parse `20Mbit` or `2.5MB/s` into bytes per second. ValueError says what is wrong."""
    if text.lower() == NONE:
        return 0.0
    rate = _quantity(text, "20Mbit or 2.5MB/s")
    if rate < 1000:
        raise ValueError(f"{text}: that is too little to take part; allow at least 8kbit")
    if rate > MOST_RATE:
        raise ValueError(f"{text}: no line carries that much; name at most 400Gbit, or none")
    return rate


def parse_size(text: str) -> int:
    """Parse `6GB` into bytes. ValueError says what is wrong."""
    size = 0.0 if text.lower() == NONE else _quantity(text, "6GB")
    if size > MOST_BYTES:
        raise ValueError(f"{text}: no machine holds or moves that much; name at most 10000TB, or none")
    return int(size)


def parse_share(text: str) -> float:
    """Parse `50%` into 0.5. ValueError says what is wrong."""
    if text.lower() == NONE:
        return 1.0
    try:
        return float(text.removesuffix("%")) / 100
    except ValueError:
        raise ValueError(f"{text}: not a share like 50%") from None


def parse_power(text: str, num_devices: int = 1) -> float:
    """Parse `200W`, for so many devices together, into watts. ValueError says what is wrong."""
    if text.lower() == NONE:
        return 0.0
    found = _POWER.fullmatch(text.strip())
    watts = 1000 ** bool(found[2]) * float(found[1]) if found else 0.0
    if watts < 1:
        raise ValueError(f"{text}: not a power like 200W")
    if watts > MOST_WATTS * num_devices:
        drawn_by = "no GPU draws" if num_devices == 1 else f"no {num_devices} GPUs draw"
        raise ValueError(f"{text}: {drawn_by} that much; name at most {MOST_WATTS * num_devices}W, like 200W, or none")
    return watts


def parse_hours(text: str) -> Hours | None:
    """Parse `22:00-07:00`. ValueError says what is wrong."""
    if text.lower() == NONE:
        return None
    start, _, end = text.partition("-")
    return Hours(_minute(start, text), _minute(end, text))


def _minute(text: str, whole: str) -> int:
    found = _TIME.fullmatch(text.strip())
    minute = 60 * int(found[1]) + int(found[2]) if found and int(found[2]) < 60 else MINUTES_A_DAY
    if minute >= MINUTES_A_DAY:
        raise ValueError(f"{whole}: not hours like 22:00-07:00")
    return minute


def _quantity(text: str, example: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text}: not an amount like {example}")
    return float(found[1]) * _POWERS[found[2].lower()] / (1 if found[3].startswith("B") else 8)


def to_fields(limits: Limits) -> dict[str, Any]:
    """The limits as plain values for JSON."""
    return dataclasses.asdict(limits) | {"hours": hours_text(limits.hours)}


def hours_text(hours: Hours | None) -> str:
    return f"{clock(hours.start)}-{clock(hours.end)}" if hours else ""


def from_fields(fields: Mapping[str, Any]) -> Limits:
    """The inverse of `to_fields`. ValueError or TypeError for anything else."""
    known = {field.name: field.type for field in dataclasses.fields(Limits)}
    if set(fields) - set(known):
        raise ValueError(f"unknown limit {min(set(fields) - set(known))!r}")
    values = dict(fields)
    for name, value in fields.items():
        switch = name in ("while_used", "on_battery", "on_metered")
        wanted: type | tuple[type, ...] = bool if switch else str if name == "hours" else (int, float)
        if not isinstance(value, wanted) or (not switch and isinstance(value, bool)):
            raise ValueError(f"{name} cannot be {value!r}")
    values["hours"] = parse_hours(values["hours"]) if values.get("hours") else None
    return Limits(**values)


def owner_info(limits: Limits, pause: Pause | None = None, *, today: int = 0, this_month: int = 0, resting: bool = False) -> dict[str, Any]:
    """The OwnerInfo of control/protocol.py."""
    paused, until = (pause.reason, pause.until) if pause else ("", "")
    return {
        "limits": to_fields(limits),
        "today": today,
        "this_month": this_month,
        "paused": paused,
        "until": until,
        "resting": resting,
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The owner's last orders, kept across restarts."""

    limits: Limits = dataclasses.field(default_factory=Limits)
    paused: bool = False
    paused_until_s: float = 0.0
    """Wall clock; 0: until `peerd resume`."""

    @property
    def pause(self) -> Pause | None:
        """The pause that the owner ordered, if any."""
        if not self.paused:
            return None
        until_s = self.paused_until_s
        until = time.strftime("at %H:%M %Z on %Y-%m-%d", time.localtime(until_s)) if until_s else "after `peerd resume`"
        return Pause("its owner paused it", until)

    def after(self, verb: str, request: Mapping[str, Any]) -> Wishes:
        """The wishes after the verb `pause`, `resume` or `limits`. UsageError for an invalid request."""
        match verb:
            case "pause":
                for_s = request.get("for_s", 0.0)
                if isinstance(for_s, bool) or not isinstance(for_s, int | float) or not 0 <= for_s <= MAX_PAUSE_S:
                    raise UsageError("for_s must be between 0 and a year")
                return dataclasses.replace(self, paused=True, paused_until_s=time.time() + for_s if for_s else 0.0)
            case "resume":
                return dataclasses.replace(self, paused=False, paused_until_s=0.0)
        try:
            return dataclasses.replace(self, limits=from_fields({**to_fields(self.limits), **request.get("change", {})}))
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from None


def load_wishes(home: Home, usual: Limits | None = None) -> Wishes:
    """Read the home's file. Without one, what is `usual` holds; None: everything is allowed.

    UsageError for a damaged one, because the owner relies on these limits.
    """
    try:
        document = json.loads(home.limits.read_text())
        paused, until_s = document.get("paused", False), document.get("paused_until_s", 0.0)
        if not isinstance(paused, bool) or not isinstance(until_s, int | float):
            raise ValueError("paused is not yes or no")
        return Wishes(limits=from_fields(document["limits"]), paused=paused, paused_until_s=float(until_s))
    except (FileNotFoundError, NotADirectoryError):
        return Wishes(limits=usual or Limits())
    except OSError as error:
        raise disk_error(home.limits, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{home.limits} is damaged ({error})", "delete it and set the limits anew with `peerd limits`") from None


def save_wishes(home: Home, wishes: Wishes) -> None:
    """Write the home's file. DiskError if that fails."""
    with contextlib.suppress(OSError):  # the draft below fails with the same error and reports it
        home.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    document = {"limits": to_fields(wishes.limits), "paused": wishes.paused, "paused_until_s": wishes.paused_until_s}
    replace_file(home.limits, json.dumps(document))


def stamp_of(home: Home) -> tuple[int, int, int]:
    """A value that changes whenever the home's file of limits is replaced; the same as long as there is none."""
    try:
        there = home.limits.stat()
    except OSError:
        return 0, 0, 0
    return there.st_ino, there.st_mtime_ns, there.st_size
