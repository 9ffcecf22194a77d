"""What a machine that its owner carries about allows until the owner says otherwise."""

from __future__ import annotations

from peerd.policy.owner.governor import Limits


def has_battery() -> bool:
    """Whether this machine has a battery of its own, plugged in or not. False where the system does not tell."""
    import psutil

    try:
        return hasattr(psutil, "sensors_battery") and psutil.sensors_battery() is not None
    except Exception:  # the edge of what the platform tells
        return False


def usual_limits() -> Limits:
    """The limits of an owner who has set none: a laptop pauses on battery, and while somebody uses it."""
    spares = has_battery()
    return Limits(while_used=not spares, on_battery=not spares)
