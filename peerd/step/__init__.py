"""The life of a peer in its stage, step by step: ask the policy for the next act, and do it."""
