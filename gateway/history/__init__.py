"""Exact histories: the router remembers the token ids of answers, and later prompts reuse them.

Imports `gateway.text`, `process.store` and the gateway's settings; knows no HTTP and no workers.
"""
