"""Model definitions, how a model is cut into stages, and what a stage costs in memory."""
