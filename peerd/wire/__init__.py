"""The wire: gRPC services and their clients, the libp2p tunnel that carries them, and p2pd's keeper.

Converts between protobuf messages and the project's own values at this boundary; nothing generated passes inward.
"""
