"""The HTTP API, tokenising, where each request goes and why, retries.

Imports `process`, `protocol` and the settings of workers; no torch, no engine. Its rooms, from the
top: `api`, `chat`, `requests`, then `fleet`, `http` and `text`, then `routing`.
"""
