"""Conversations turn by turn beside a colocated worker and vLLM: `python -m bench.turns`.

Imports `engine`, `process`, `bench.engine` and `bench.tools`.
"""
