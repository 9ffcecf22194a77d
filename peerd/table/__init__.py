"""The table: ids, peer records, phases, the swarm view and its merge rule. A leaf: imports nothing but the standard library."""
