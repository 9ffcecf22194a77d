"""The life of a step: ledgers, rosters, what a peer does next, how a run recovers."""
