"""Where a microbatch goes, who launches it, who takes it, and how its tensors are encoded."""
