"""Shared by every process of any role: settings, lifecycle, sockets, store, metrics, logs.

Imports `protocol` alone; knows no engine, no role's work and no HTTP.
"""
