"""From text to tokens: where a run's text is read from, its tokenizer, and the one token file that all peers agree on by hash."""
