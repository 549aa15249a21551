"""Tiers below a worker's KV pool, which keep evicted blocks: host memory, and below it local disk.

Only its own worker reads a tier. Knows neither sequences nor sockets. Imports `scheduling`,
`process` and `protocol`.
"""
