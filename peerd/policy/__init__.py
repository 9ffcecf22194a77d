"""Decisions: pure functions of the live view, the time and one's own id. Standard library only, no I/O, no clock, no chance."""
