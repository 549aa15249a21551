"""Shared by both worker roles: the host process, its life and steps, settings, intake, reports,
blocks in and out; `startup`: what comes before.

Imports `engine`, `kv_transfer`, `process` and the packages below them; no role.
"""
