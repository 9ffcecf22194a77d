"""How a peer shares its memory and its time among those who ask the model something. Pure."""
