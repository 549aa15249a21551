"""`python -m bench.engine`: tokens per second of Baton and its peers, on the same checkpoint.

Imports `engine`, `scheduling`, `process` and `bench.tools`.
"""
