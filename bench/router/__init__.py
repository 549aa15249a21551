"""`python -m bench.router`: what the router costs per request and per token.

The workers behind it compute nothing. Imports `protocol`, `process` and `bench.tools`.
"""
