"""peerd: a peer-to-peer daemon with which volunteers train one large model together."""

__version__ = "0.1.0"
SCHEMA = 1
"""Version of the JSON objects that daemons, commands and their child processes answer with; each has it as its field `schema`."""
