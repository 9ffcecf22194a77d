"""The self-test of the device that computes: codecs, kernels, precisions, a stage's whole life, memory, speed."""
