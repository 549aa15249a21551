"""Tokens per second of Baton and its peers on the same checkpoint: `python -m bench.engine`.

Imports `engine`, `scheduling`, `process` and `bench.tools`.
"""
