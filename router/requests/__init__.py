"""The life of a request: attempts, retries, hand-over, resumption, token order, traces.

Imports `router.fleet`, `router.routing` and `router.text`; no HTTP but its metrics and the
origin of requests.
"""
