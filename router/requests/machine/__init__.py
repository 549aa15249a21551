"""The states of a request: events in, actions out. Pure: no clock, no tasks, no sockets.

Imports of `router` what decides, what workers are, and what the gateway asks for.
"""
