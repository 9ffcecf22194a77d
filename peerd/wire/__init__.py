"""Messages between peers: gRPC services and their clients, tensors and their codecs.

Converts between protobuf messages and the project's own values at this boundary; nothing generated passes inward.
"""
