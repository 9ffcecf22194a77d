"""Keeps the table fresh: identity and signatures, the DHT directory, gossip and liveness."""
