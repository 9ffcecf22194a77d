"""What peers did and when: spans, a ring that keeps the last of them, and what can be told from them. Stdlib only; decides nothing."""
