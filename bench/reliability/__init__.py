"""Loads, faults and inputs for `bench.chaos`, `bench.soak` and `bench.fuzz`.

Imports the parsers that are fuzzed, and `bench.tools`.
"""
