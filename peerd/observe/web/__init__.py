"""The dashboard: one page, its data as a stream of server-sent events, metrics, and the way out. Loaded only where it is served."""
