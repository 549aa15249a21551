"""The process that `baton router` starts: gateway, console and router, assembled from settings.

Imports all three, `http_kit`, `checkpoint` and `process`; no torch, no engine, no worker.
"""
