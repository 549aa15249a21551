"""The router's cost per request and per token: `python -m bench.router`.

The workers behind the router compute nothing. Imports `protocol`, `process` and `bench.tools`.
"""
