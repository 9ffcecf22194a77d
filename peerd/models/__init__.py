"""Model definitions, the cutting of models into stages, and a stage's memory cost."""
