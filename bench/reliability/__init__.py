"""Loads and faults for `bench.chaos`, `bench.soak` and `bench.tight_pools`.

Imports `bench.tools`.
"""
