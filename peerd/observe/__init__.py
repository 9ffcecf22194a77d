"""What can be seen of a run over time: history, contributions, metrics, dashboard. Only looks; nothing is decided by it."""
