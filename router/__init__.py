"""The router: HTTP API, tokenizing, placement of requests on workers, retries.

Imports `process`, `protocol`, `checkpoint` and `scheduling`; no torch, no engine, no worker. Its
packages, from the top: `api`, `chat`, `output`, `requests`, then `fleet`, `http` and `text`, then
`routing` and `admission`.
"""
