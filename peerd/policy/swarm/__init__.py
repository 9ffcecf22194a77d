"""Decisions about the swarm as a whole: how news spreads, which peers are gone, which move, which relay, and what is wrong."""
