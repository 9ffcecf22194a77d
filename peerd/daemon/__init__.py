"""The composition root: builds the parts of a daemon and runs them in one TaskGroup."""
