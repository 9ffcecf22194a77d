"""Turns text into tokens: the sources of a run's text, its tokenizer, and the token file, on whose hash all peers agree."""
