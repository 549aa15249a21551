"""Moves KV blocks between two workers: what may be written, when, and by which means.

`handoff` decides and is pure; `transports` move bytes; `service` is the thread that owns a
transport; `authentication` keeps forged descriptors away from it. A block here is an address and a
number of bytes. Imports `protocol` alone: neither engine, nor scheduler, nor control sockets.
"""
