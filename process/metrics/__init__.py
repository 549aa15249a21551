"""Metrics of any process: the server that shows them, and kinds that are cheap to update.

Imports `protocol` and `process.sockets`.
"""
