"""Transports write blocks into a peer's pool: `interface` defines them, `registry` lists them.

Imports `protocol` and `kv_transfer.head_slices`.
"""
