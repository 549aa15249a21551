"""The operators' view: the page, reports over HTTP, telemetry, and the doctor's findings.

Imports `router`, `http_kit`, `process` and `protocol`; nothing of the gateway. Its packages, from
the top: `dashboard` and `endpoints`, then `telemetry`, then `doctor`.
"""
