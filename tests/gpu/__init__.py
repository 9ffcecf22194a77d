"""Tests on a real GPU; they are skipped where there is none."""
