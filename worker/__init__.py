"""Shared by both worker roles: the host process, settings, intake, blocks in and out, reports.

Imports `engine`, `kv_transfer`, `process` and the packages below them; no role.
"""
