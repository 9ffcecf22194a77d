"""How much this process gives way to the other programs of its machine."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
"""Linux shares cores between sessions first, and looks at niceness only among the processes of one session (sched(7)).

The file says `/autogroup-25 nice 0`, and takes a niceness for the whole session. Without that a daemon in a session of its own would
compete with the owner's programs as an equal, whatever its own niceness. The file is absent where the kernel was built without autogroups.
"""


def niceness() -> int:
    """The niceness of this process, -20 to 19. The scheduler prefers a process whose niceness is lower."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def give_way(least: int) -> None:
    """Raise the niceness to `least`, unless it is higher, also that of the session where this process leads one.

    Call it before the first thread starts: threads inherit the niceness.
    """
    if niceness() < least:
        os.setpriority(os.PRIO_PROCESS, os.getpid(), least)
    if os.getsid(0) == os.getpid():  # a session that this process was started in holds the owner's own programs
        with contextlib.suppress(OSError):
            told = re.search(r"nice (-?\d+)", AUTOGROUP.read_text(encoding="ascii"))
            if told is not None and int(told[1]) < least:
                AUTOGROUP.write_text(str(least), encoding="ascii")
