"""The life of a request: attempts, retries, hand-over, resumption, token order, traces.

Imports `router.fleet`, `router.routing`, and of `http_kit` the origin of requests.
"""
