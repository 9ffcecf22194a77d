"""What one peer computes: a stage's forward and backward, its gradient accumulator, optimizer and state."""
