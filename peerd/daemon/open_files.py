"""The number of files and sockets that this process may have open: raised at the start, counted while it runs."""

from __future__ import annotations

import contextlib
import resource

import psutil

from peerd.errors import LimitError
from peerd.policy.swarm.checkup import files_needed, too_few_files

MOST = 1 << 16
"""More is of no use, and slows programs down that close all files they may have."""
LEAST_HARD = 10_240
"""What macOS allows where it says that there is no limit."""


def raise_limit() -> int:
    """Raise the limit as far as the system lets this process, for its children too. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (MOST, LEAST_HARD):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                break
    return limit()


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def check_limit(num_peers: int) -> None:
    """LimitError where a peer that works with so many others needs more."""
    if limit() < files_needed(num_peers):
        raise LimitError(*too_few_files(limit(), num_peers))


def num_open() -> int:
    """How many are open now; the limit where not even that can be found out."""
    try:
        return psutil.Process().num_fds()
    except (OSError, psutil.Error):
        return limit()
