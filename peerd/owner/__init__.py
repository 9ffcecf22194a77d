"""What the owner of the machine allows: limits, sensors, quotas, pauses."""
