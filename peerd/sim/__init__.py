"""The simulator: swarms in virtual time, driven by the very decisions of `policy/`. No sockets, no clock, no torch."""
