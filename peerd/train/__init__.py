"""What a run trains on, and which trainer launches which microbatch when."""
