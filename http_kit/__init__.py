"""What the gateway, the console and the router share of HTTP: errors, streams of events, callers.

A caller is known by its key's digest, and its terms are its key's. Imports `protocol` alone; knows
no endpoint, no fleet and no model.
"""
