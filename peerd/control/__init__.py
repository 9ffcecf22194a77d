"""The local control service: how the command line talks to the daemon of one home."""
