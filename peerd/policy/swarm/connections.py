"""How many connections a daemon keeps, and for how long it keeps one that nothing uses: of hundreds of mates each is needed seldom."""

from __future__ import annotations

UNUSED_S, UNUSED_IN_NEED_S = 600.0, 90.0
"""A connection that nothing has used for so long is closed; the second number counts where files run short. A direct path asks over the
tunnel once a minute."""
IN_NEED = 0.5
"""Files run short once this share of the limit is open."""
FILES_OF_A_CONNECTION, MOST_CONNECTIONS = 4, 2048
"""Files of p2pd for a connection with its streams, and the most connections whatever the limit. A swarm of 10,000 peers in 32 stages has
some 1,000 peers in a stage and the two beside it."""


def kept_unused_s(num_open: int, limit: int) -> float:
    """Seconds for which a connection that nothing uses is kept, while so many files of the limit are open."""
    return UNUSED_S if num_open < IN_NEED * limit else UNUSED_IN_NEED_S


def water_marks(limit: int) -> tuple[int, int]:
    """The numbers of connections between which p2pd keeps them: above the second it closes some, those without streams first.

    `limit`: the open files that it may have.
    """
    high = max(1, min(MOST_CONNECTIONS, limit // FILES_OF_A_CONNECTION))
    return 3 * high // 4, high
