"""Timelines: spans of what a peer did, the ring that keeps the latest, and their analysis. Standard library only; decides nothing."""
