"""Configuration: the run (manifest), this volunteer's choices (settings, limits) and the location of their files (paths)."""
