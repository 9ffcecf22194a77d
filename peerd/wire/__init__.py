"""Messages between peers: gRPC services and their clients, tensors and their codecs.

This room converts between protobuf messages and peerd's own values. No other room sees generated types.
"""
