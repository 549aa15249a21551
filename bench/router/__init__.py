"""`python -m bench.router`: the router's cost per request and per token.

The workers behind the router compute nothing. Imports `protocol`, `process` and `bench.tools`.
"""
