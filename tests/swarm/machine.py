"""How much slower than idle this machine is just now: a promise in seconds is one about a machine that does nothing else."""

from __future__ import annotations

import time

SPIN_S = 0.1


def slowdown() -> float:
    """Wall time over processor time of a loop that wants a whole processor; 1 on an idle machine."""
    began_s, used_s = time.monotonic(), time.process_time()
    while time.process_time() - used_s < SPIN_S:
        continue
    return max(1.0, (time.monotonic() - began_s) / SPIN_S)
