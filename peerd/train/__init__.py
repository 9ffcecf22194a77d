"""What the run trains on, and who launches which microbatch when."""
