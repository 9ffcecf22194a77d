"""What the owner's limits permit, and how often peers are helped."""
