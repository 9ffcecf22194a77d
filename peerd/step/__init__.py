"""The life of a peer in its stage, step by step: asks the policy what comes next, and does it."""
