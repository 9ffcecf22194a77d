"""The thin client: parse, ask the daemon over its control socket, print. No torch, no hivemind, no grpc."""
