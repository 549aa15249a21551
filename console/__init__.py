"""What operators look at: the page, reports over HTTP, telemetry, and what is wrong with the fleet.

Imports `router`, `http_kit`, `process` and `protocol`; nothing of the gateway. Its packages, from
the top: `dashboard` and `endpoints`, then `telemetry`, then `doctor`.
"""
