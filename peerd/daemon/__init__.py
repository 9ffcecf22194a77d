"""The composition root: builds the parts of one daemon and runs them in one TaskGroup."""
