"""Connections to peers: p2pd and the tunnel through it, circuits over relays, direct and local connections, their rates and caps."""
