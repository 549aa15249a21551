"""Handoffs: which worker may write which blocks, and until when.

Pure state machines: time is an argument, and transports are unknown. Imports `protocol` and
the shapes of blocks that `kv_transfer.head_slices` describes.
"""
