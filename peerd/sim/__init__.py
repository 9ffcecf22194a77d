"""The simulator: swarms in virtual time, driven by the daemon's own decisions in `policy/`. No sockets, no clock, no torch."""
