"""The audits of one peer: it computes some work of its mates again, and judges with them what it finds wrong. Rule 20 (audit)."""
