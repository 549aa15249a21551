"""The router: HTTP API, tokenizing, placement of requests on workers, retries.

Imports `process`, `protocol` and the settings of workers; no torch, no engine. Its packages, from
the top: `api`, `chat`, `requests`, then `fleet`, `http` and `text`, then `routing` and `admission`.
"""
