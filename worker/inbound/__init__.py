"""KV that comes from other workers: handoffs to this worker, fetches from peers' caches, and the
caches of workers that drain.

Imports `worker.host` and the packages below `worker`.
"""
