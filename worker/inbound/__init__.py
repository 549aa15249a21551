"""KV that comes from other workers: handoffs to this worker, and fetches from peers' caches.

Imports `worker.host`, `worker.assembly` and the packages below `worker`.
"""
