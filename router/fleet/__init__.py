"""The workers that the router uses: their links, load, cached blocks and metrics.

Imports `router.routing`, `process.sockets` and `protocol`; no HTTP.
"""
