"""What looks at a daemon and changes nothing: history, metrics, dashboard, traces."""
