"""The control socket: the command line sends requests over it to the daemon of one home."""
