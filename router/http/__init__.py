"""HTTP: server, connections and their limits, disconnects, server-sent events, errors, keys.

Imports `process` and `protocol`; knows no endpoint, no fleet and no model.
"""
