"""Asks the swarm to go on with texts: the caller of what `stage/texts.py` does."""
