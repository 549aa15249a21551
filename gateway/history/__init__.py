"""Histories token for token: the router remembers the ids of answers, and later prompts use them.

Imports `gateway.text`, `process.store` and the gateway's settings; knows no HTTP and no workers.
"""
