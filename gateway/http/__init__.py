"""HTTP: server, connections and their limits, access by key, a record for each request.

Imports `gateway.admission`, the gateway's settings and metrics, `http_kit`, `process` and
`protocol`; knows no endpoint, no fleet and no model.
"""
