"""peerd: a peer-to-peer daemon with which volunteers train one large model together."""

__version__ = "0.1.0"
