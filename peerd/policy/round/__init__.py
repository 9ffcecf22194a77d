"""A round of averaging that lasts as long as its links need: chunks, who owes what, whom it goes on without; and a simulator of it."""
