"""The computation of one peer: a stage's forward and backward passes, its gradient accumulator, optimizer and state."""
