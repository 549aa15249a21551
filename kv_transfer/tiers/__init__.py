"""Tiers below a worker's KV pool, which keep evicted blocks: host memory, and below it local disk.

A tier is read by its own worker only. Knows neither sequences nor sockets. Imports `scheduling`,
`process` and `protocol`.
"""
