"""Shared by several benchmarks: checkpoints, processes, fleets, loads over HTTP.

Imports `protocol` and `process`; no other benchmark.
"""
