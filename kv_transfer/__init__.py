"""Moves KV blocks between two workers: what may be written, when, and by which means.

`sender` and `receiver` are the two sides of a handoff, pure state machines that answer every
event with actions for their owner. `service` is the thread that owns a `transport`: NIXL
(`nixl_transport`) or shared memory on one host (`shm_transport`). `authentication` keeps forged
descriptors away from them. A block here is an address and a number of bytes: the package knows
neither what blocks mean, nor schedulers, nor the sockets on which grants travel.
"""
