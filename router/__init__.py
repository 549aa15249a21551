"""Where a request runs: attempts and retries, the choice of workers, the fleet.

Imports `http_kit`, `process`, `protocol` and `scheduling`; no torch, no engine, no worker, nothing
of the gateway or the console. The gateway uses it through `requests.interface`. Its packages, from
the top: `requests`, `fleet`, `routing`.
"""
