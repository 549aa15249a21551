"""Handoffs: who may write which blocks, and until when.

Pure state machines: time is an argument, and no transport is known here. Imports `protocol` and
the shapes of blocks that `kv_transfer.head_slices` describes.
"""
