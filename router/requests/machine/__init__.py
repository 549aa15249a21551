"""The states of a request: events in, actions out. Pure: no clock, no tasks, no sockets.

Imports `router.routing`, the workers of `router.fleet`, and the interface to the gateway.
"""
