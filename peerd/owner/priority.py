"""How much this process gives way to the other programs of its machine."""

from __future__ import annotations

import os


def niceness() -> int:
    """The niceness of this process, -20 to 19. The scheduler prefers a process whose niceness is lower."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def give_way(least: int) -> None:
    """Raise the niceness to `least`, unless it is higher. Call it before the first thread starts: threads inherit it."""
    if niceness() < least:
        os.setpriority(os.PRIO_PROCESS, os.getpid(), least)
