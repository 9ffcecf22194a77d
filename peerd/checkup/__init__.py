"""`peerd doctor`: what may keep this machine from taking part, found here and by asking peers."""
