"""Group all-reduce within a stage: rounds over a roster, and the stepper that decides when."""
