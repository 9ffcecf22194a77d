"""The liars of `scripts/bench liars`: modules that a daemon with allow_faults loads (peerd/daemon/liars.py)."""
