"""Decisions about the owner's limits, and about how often this peer helps others."""
