"""HTTP code that the gateway, the console and the router share: errors, event streams, callers.

A caller is known by its key's digest and has its key's terms. Imports `protocol` alone; knows no
endpoint, no fleet and no model.
"""
