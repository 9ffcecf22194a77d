"""Observation of a run over time: history, contributions, metrics, dashboard. Nothing here influences a decision."""
