"""`baton preflight`: whether nodes can run workers that hand KV blocks to each other.

Imports transports, the store and the settings of workers; starts no worker.
"""
