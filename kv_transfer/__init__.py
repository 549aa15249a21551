"""Moves KV blocks between two workers: which blocks may be written, when, and how.

`handoff` makes the decisions and is pure; `transports` move bytes; `service` is the thread that
owns a transport; `authentication` rejects forged descriptors before a transport sees them;
`staging` is a small pool for other bytes; `tiers` keep blocks that the pool evicts. A block here is
an address and a number of bytes. Imports `protocol`, and `scheduling` for the tiers: no engine or
control sockets.
"""
