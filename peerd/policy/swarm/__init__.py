"""Who belongs where: how news spreads, who is gone, who moves, who relays, what is wrong."""
